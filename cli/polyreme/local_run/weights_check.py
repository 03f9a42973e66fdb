"""Checks of released weights by the headers of their files, before a job starts from them."""

from __future__ import annotations

from polyreme_launcher.urls import weights_place
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.locations import folder_at
from polyreme_trainer.weights.token_texts import check_tokens, refuse_unused


def check_files(location: str, shape: ModelShape, *, own_tokenizer: bool) -> None:
    """Refuse weights that are missing, cut short, of another model, or of a tokenizer that a job does not use.

    Args:
        location: Where they lie.
        shape: The model of the job's first step.
        own_tokenizer: Whether the job names no tokenizer.

    Raises:
        NotFoundError: If the folder or a file of it does not exist.
        InvalidConfigError: Naming the first rule that is broken.
    """
    catalogue = read_catalogue(weights_place(location))
    check_fit(catalogue, shape)
    if own_tokenizer:
        refuse_unused(catalogue.folder)


def check_tokenizer_of(location: str, tokenizer: bytes) -> None:
    """Refuse a tokenizer that is not the weights' own.

    Raises:
        InvalidConfigError: Naming the first token that differs.
    """
    check_tokens(folder_at(weights_place(location)), tokenizer)
