"""A run writes its model to a bucket of a real S3 server, and starts from weights there."""

from __future__ import annotations

import pathlib

import pytest
import torch

from polyreme_api.batch import TokenIds
from polyreme_datahub.objects import open_store
from polyreme_launcher.urls import export_place, weights_place
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.stored import StoredExport
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.slices import Place, Rows
from tests.exports import export_model

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_an_export_into_a_bucket_replaces_the_earlier_one_and_every_weight_arrives_as_it_was(
    bucket: str, tmp_path: pathlib.Path
) -> None:
    state = build_model(KIMI_VL_NANO, seed=5, media_token=1).state_dict()
    tokens = TokenIds(media=1, end=2, pad=0)
    export_model(state, KIMI_VL_NANO, tmp_path / "e", tokens=tokens, shard_bytes_max=400_000)
    open_store(bucket).put("model-00099-of-00099.safetensors", b"of an earlier export")
    place = export_place(bucket)
    assert isinstance(place, StoredExport)
    place.upload(tmp_path / "e")
    exported = {path.relative_to(tmp_path / "e").as_posix() for path in (tmp_path / "e").rglob("*") if path.is_file()}
    assert {info.key for info in open_store(bucket).list("")} == exported
    catalogue = read_catalogue(weights_place(bucket))
    held = build_model(KIMI_VL_NANO, seed=6, media_token=1).state_dict()
    names = check_fit(catalogue, KIMI_VL_NANO)
    load_weights(Rows.whole(held), catalogue, names, Place(experts=range(KIMI_VL_NANO.decoder.experts)))
    assert len({stored.file for stored in catalogue.tensors.values()}) > 3
    assert all(torch.equal(held[name], tensor) for name, tensor in state.items())
