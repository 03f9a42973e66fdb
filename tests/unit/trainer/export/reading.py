"""The way back from files to a model, for the tests of this folder."""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_planner.shapes import KIMI_VL_NANO, ModelShape
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.locations import Folder
from polyreme_trainer.weights.slices import Place, Rows

TOKENS = TokenIds(media=1, end=2, pad=0)
ALL = Place(experts=range(KIMI_VL_NANO.decoder.experts))


def read_back(
    folder: pathlib.Path | Folder, shape: ModelShape = KIMI_VL_NANO, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Load a folder into another model of the same shape."""
    other = build_model(shape, seed=99, media_token=TOKENS.media, dtype=dtype).state_dict()
    catalogue = read_catalogue(folder)
    load_weights(Rows.whole(other), catalogue, check_fit(catalogue, shape), ALL)
    return other


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
