"""The reported routing of a step, by layer, and the routing table beside the checkpoints, by expert."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from polyreme_api.history import routing_key
from polyreme_api.progress import LAYERS_MAX
from polyreme_datahub.objects import open_store
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.train.routing_tables import RoutingTable

SHAPE = dataclasses.replace(KIMI_VL_NANO.decoder, layers=3, dense_layers=1, experts=4, experts_per_token=2)
LOAD = torch.tensor([[4.0, 4, 4, 4], [1.0, 2, 3, 10]])
DROPPED = torch.tensor([[0.0, 0, 0, 0], [0.0, 0, 1, 5]])
ENTROPY = torch.tensor([[8 * 1.25], [8 * 0.5]])
STEP_MX = torch.cat((LOAD, DROPPED, ENTROPY), dim=1)


def test_routing_is_reported_by_three_numbers_per_layer_and_stored_by_expert(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    table = RoutingTable(store, SHAPE, attempt=2)
    told = table.reportable(STEP_MX)
    assert told is not None
    assert (told.first_layer, told.load_max, told.dropped) == (1, (1.0, 2.5), (0, 6))
    assert told.entropy == pytest.approx((1.25, 0.5)), "of each of eight tokens"
    table.add(STEP_MX, step=5)
    table.add(2 * STEP_MX, step=6)
    table.write(step=6)
    written = json.loads(store.get(routing_key(2)))
    assert (written["fromStep"], written["step"]) == (5, 6)
    first, second = written["layers"]
    assert (first["layer"], first["load"], first["tokens"]) == (1, [12] * 4, 24)
    assert (second["load"], second["dropped"]) == ([3, 6, 9, 30], [0, 0, 3, 15])
    assert second["entropy"] == pytest.approx(0.5)


def test_a_step_without_tokens_and_a_model_of_very_many_layers_break_nothing(tmp_path: Path) -> None:
    table = RoutingTable(open_store(tmp_path.as_uri()), SHAPE, attempt=1)
    empty = table.reportable(torch.zeros_like(STEP_MX))
    assert empty is not None
    assert (empty.load_max, empty.entropy, empty.dropped) == ((0.0, 0.0), (0.0, 0.0), (0, 0))
    assert table.reportable(torch.zeros(LAYERS_MAX + 1, STEP_MX.shape[1])) is None
    assert table.reportable(torch.zeros(0, STEP_MX.shape[1])) is None
