"""All ranks open the same groups and make the same exchanges in one order, each group warmed before the first step."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel import collectives, world
from polyreme_trainer.parallel.flat_buffers import FlatModel, Update, flatten
from polyreme_trainer.parallel.flat_layout import Shares
from polyreme_trainer.parallel.pipeline import NO_STAGES
from polyreme_trainer.parallel.world import RankSettings, open_world
from polyreme_trainer.parallel.zero1 import Zero1Update, open_zero1, update_groups
from polyreme_trainer.train.image_assignment import image_group
from tests.unit.trainer.parallel.recorded_ranks import CASES, LAYERS

ROOT = Path(__file__).parents[4]
LARGE = Layout(dp=128, pp=8, ep=64)
SOCKETS_MAX = LARGE.world - 1
"""Of one group of gloo."""


@pytest.fixture(scope="module")
def recorded() -> list[list[dict[str, Any]]]:
    """Groups and exchanges of each rank, by case."""
    command = [sys.executable, "-m", "tests.unit.trainer.parallel.recorded_ranks"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=paths)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def each_case(recorded: list[list[dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for (layout, changes), ranks in zip(CASES, recorded, strict=True):
        yield f"{layout} {changes}", ranks


def members(ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {name: list(group) for rank in ranks for name, _, group in rank["groups"]}


def comparable(rank: dict[str, Any]) -> list[tuple[str, str]]:
    """Exchanges of the first step but those between stages, whose order is the schedule's: each has two ends."""
    between = {name for name, names, _ in rank["groups"] if "pp_group" in names}
    calls = [(kind, group) for kind, group in rank["step"] if not (group in between and kind == "batch_isend_irecv")]
    assert calls
    return calls


@pytest.mark.slow
def test_all_members_of_a_group_open_it_after_as_many_others(recorded: list[list[dict[str, Any]]]) -> None:
    assert len(recorded) == 12
    for case, ranks in each_case(recorded):
        for rank, found in enumerate(ranks):
            for place, (name, _, group) in enumerate(found["groups"]):
                assert rank in group
                assert all(ranks[other]["groups"][place][0] == name for other in group), case


@pytest.mark.slow
def test_all_members_of_a_group_warm_it_in_one_order(recorded: list[list[dict[str, Any]]]) -> None:
    for case, ranks in each_case(recorded):
        groups = members(ranks)
        for name, group in groups.items():
            orders = [[call for call in ranks[rank]["opening"] if call[1] == name] for rank in group]
            assert all(order == orders[0] for order in orders), case


@pytest.mark.slow
def test_steps_make_no_kind_of_exchange_for_the_first_time(recorded: list[list[dict[str, Any]]]) -> None:
    for case, ranks in each_case(recorded):
        for found in ranks:
            assert set(map(tuple, found["step"])) <= set(map(tuple, found["opening"])), case


@pytest.mark.slow
def test_any_two_ranks_make_the_exchanges_of_their_common_groups_in_one_order(
    recorded: list[list[dict[str, Any]]],
) -> None:
    for case, ranks in each_case(recorded):
        groups = members(ranks)
        for one, other in itertools.combinations(range(len(ranks)), 2):
            common = {name for name, group in groups.items() if one in group and other in group}
            orders = [[call for call in comparable(ranks[rank]) if call[1] in common] for rank in (one, other)]
            assert orders[0] == orders[1], f"{case}: ranks {one} and {other}"


@pytest.mark.slow
def test_sharded_updates_overlap_the_backward_pass(recorded: list[list[dict[str, Any]]]) -> None:
    """Without a pipeline, each rank has layers that still exchange when the first buckets leave."""
    for case, ranks in each_case(recorded):
        if "zero1=True" not in case or " pp" in case:
            continue
        kinds = [kind for kind, _ in comparable(ranks[0])]
        last_of_layers = max(place for place, kind in enumerate(kinds) if kind == "all_to_all_single")
        assert "reduce_scatter_single" in kinds[:last_of_layers], case


@pytest.mark.slow
def test_a_step_waits_once_in_each_layout_and_once_a_layer_with_uneven_exchanges(
    recorded: list[list[dict[str, Any]]],
) -> None:
    layers = LAYERS - KIMI_VL_NANO.decoder.dense_layers
    for (layout, changes), ranks in zip(CASES, recorded, strict=True):
        exchanged = sum(found["waits"].pop("parallel/dispatch.py", 0) for found in ranks)
        microbatches = changes.get("pipeline", NO_STAGES).microbatches * layout.world // layout.pp
        assert exchanged == (layers * microbatches if layout.ep > 1 else 0), f"{layout} {changes}"
        assert all(found["waits"] == {"parallel/gradients.py": 1} for found in ranks), f"{layout} {changes}"


@pytest.mark.slow
def test_no_parameter_gets_two_gradients_in_one_backward(recorded: list[list[dict[str, Any]]]) -> None:
    """They would be added in the parameter's own type, not in the buffer's float32."""
    for case, ranks in each_case(recorded):
        # 0: torch splits the backward of such a stage, and gradients of weights are asked for by themselves.
        assert {rank["gradients"] for rank in ranks} <= {0, 1}, case


@dataclasses.dataclass
class Sent:
    """An exchange that has begun, and ends at once."""

    def wait(self) -> None:
        pass


def sharded(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> tuple[FlatModel, Zero1Update, list[int]]:
    """An update of one matrix a bucket, and the first scalars of the buckets that have left."""
    parameters = {name: nn.Parameter(torch.ones(8, 8)) for name in names}
    update = Update(zero1=True, bucket_scalars=64)
    flat = flatten(parameters, piggybacked=0, stage=Shares(count=2, place=0), update=update)
    left: list[int] = []

    def begin(_own: Tensor, whole: Tensor, _group: object) -> Sent:
        left.append(whole.storage_offset() // 64)
        return Sent()

    monkeypatch.setattr(collectives, "begin_reduce_scatter", begin)
    groups = collections.defaultdict[str, Any](lambda: None)
    return flat, open_zero1(flat, groups, (), by_layer=True), left


LAYER = "language_model.model.layers.{}.self_attn.o_proj.weight"
MODEL = [
    "vision_tower.patch_embed.proj.weight",
    "language_model.model.embed_tokens.weight",
    *(LAYER.format(layer) for layer in range(3)),
    "language_model.lm_head.weight",
]


def test_when_a_bucket_leaves_is_fixed_by_layer_whatever_gradients_a_rank_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gradient is made here at all."""
    _, update, left = sharded(monkeypatch, MODEL)
    stream = torch.ones(2, requires_grad=True)
    update.begin(passes=2)
    for passes in range(2):
        through = stream
        for layer in range(3):
            through = update.watch(layer, through) * 2
        assert not left, "the second pass still adds to every gradient"
        through.sum().backward()
        assert left == ([5, 4, 3, 2] if passes else [])
    update.finish()
    assert left == [5, 4, 3, 2, 1, 0]


def test_a_gradient_after_its_bucket_has_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, update, left = sharded(monkeypatch, MODEL)
    weight = dict(zip(MODEL, (parameter for _, parameter in flat.dense.parameters()), strict=True))[LAYER.format(2)]
    update.begin(passes=1)
    (update.watch(2, torch.ones(8, requires_grad=True)) * 2).sum().backward()
    assert left == [5, 4]
    with pytest.raises(RuntimeError, match="after its bucket was reduced"):
        weight.sum().backward()


def test_a_thousand_ranks_have_one_group_of_gloo_and_bind_all_others_to_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group of gloo is up to one socket for every other member, on every rank."""
    gloo: list[int] = []
    bound: list[torch.device] = []
    real_init, real_group = dist.init_process_group, dist.new_group

    def init(backend: str, **given: Any) -> None:
        assert backend == "gloo"
        gloo.append(given["world_size"])
        real_init("fake", store=FakeStore(), rank=given["rank"], world_size=given["world_size"])

    def new_group(ranks: list[int], *, backend: str, device_id: torch.device, **_: Any) -> Any:
        assert backend == "nccl"
        bound.append(device_id)
        return real_group(ranks, backend="fake", use_local_synchronization=True)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(world, "_open_store", lambda _: FakeStore())
    monkeypatch.setattr(world, "_wait_for_all", lambda *_: None)
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    settings = RankSettings(rank=3, world=LARGE.world, attempt=1, device_type="cuda")
    with caplog.at_level("INFO"), FakeTensorMode(allow_non_fake_inputs=True), open_world(settings, LARGE) as opened:
        meshes = opened.meshes
        for wanted in (update_groups(meshes), image_group(meshes)):
            meshes.communicators.open(wanted)
    assert sum(size - 1 for size in gloo) == SOCKETS_MAX
    assert set(bound) == {torch.device("cuda", 3)}
    assert len(bound) == len(meshes.communicators.opened) == 9
    assert "world_group (1024 ranks), stage_group (128 ranks)" in caplog.text
