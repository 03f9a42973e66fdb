"""Check that two tokenizers write the same text by the same number, which no shape in the files of weights shows."""

from __future__ import annotations

import json

from polyreme_api.batch import TEMPLATE_FILE
from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.export.huggingface import TOKENIZER_FILE
from polyreme_trainer.weights.locations import Folder

FIELD = "spec.data.tokenizer.location"


def check_tokens(folder: Folder, own: bytes) -> None:
    """Refuse a tokenizer that writes another text by a number that the weights know; more tokens are fine.

    Args:
        folder: Of the weights; without a tokenizer of theirs nothing is known.
        own: ``tokenizer.json`` of the job.

    Raises:
        InvalidConfigError: Naming the first token that differs.
    """
    if folder.size_bytes(TOKENIZER_FILE) is None:
        return
    theirs, ours = token_texts(folder.read(TOKENIZER_FILE), folder), token_texts(own, folder)
    differ = sorted(number for number in theirs.keys() & ours.keys() if theirs[number] != ours[number])
    if differ:
        first = differ[0]
        raise InvalidConfigError(
            f"weights were trained with another tokenizer: {len(differ)} of its {len(theirs)} tokens mean other text "
            f"in the job's, the first is {first}, {theirs[first]!r} in {TOKENIZER_FILE} of {folder} and "
            f"{ours[first]!r} in the job's; {_remedy(folder)}",
            field=FIELD,
        )


def refuse_unused(folder: Folder) -> None:
    """Refuse to train a new tokenizer for weights that come with one.

    Raises:
        InvalidConfigError: Naming the location to use.
    """
    if folder.size_bytes(TOKENIZER_FILE) is not None:
        raise InvalidConfigError(
            f"weights come with a tokenizer that the job does not use: {TOKENIZER_FILE} in {folder}, and without "
            f"data.tokenizer.location the job trains a new one, whose tokens mean other text; {_remedy(folder)}",
            field=FIELD,
        )


def token_texts(tokenizer: bytes, folder: Folder) -> dict[int, str]:
    """Return what is written for each token of a ``tokenizer.json``.

    Raises:
        InvalidConfigError: If it is none.
    """
    try:
        value = json.loads(tokenizer)
        words = value.get("model", {}).get("vocab", {})
        found = {int(number): str(word) for word, number in words.items()}
        return found | {int(token["id"]): str(token["content"]) for token in value.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfigError(
            f"tokenizer of the weights can't be read: {TOKENIZER_FILE} of {folder} or of the job ("
            f"{type(error).__name__}: {error}), expected one of Hugging Face's with a vocabulary",
            field=FIELD,
        ) from error


def _remedy(folder: Folder) -> str:
    if folder.size_bytes(TEMPLATE_FILE) is not None:
        return "set it to that folder"
    return (
        f"set it to that folder and write a {TEMPLATE_FILE} there (docs/how-to/huggingface-weights.md), or use weights "
        f"without {TOKENIZER_FILE} to train embeddings for a new tokenizer"
    )
