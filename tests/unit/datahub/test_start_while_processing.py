"""Training that starts while its data are processed: the order, states and batches are those of processed data."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme_api.batch import PackedBatch
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotSealedError, RefusedError
from polyreme_api.job import parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import block_sealing
from polyreme_datahub.digests import blob_key
from polyreme_datahub.index.blocks import Journal
from polyreme_datahub.index.format import plan_key
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import describe_error, error_of
from polyreme_datahub.loader.order import order
from polyreme_datahub.loader.sample import growth
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import open_store
from polyreme_datahub.runner import flow
from tests.unit.datahub.jobs import Home, digits, make_spec, released_tokenizer, write_jsonl

JOB = "uid-1"
BLOCK = 64
PAGES = 200
STEPS = 16
"""Steps of two epochs."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, items and windows are small, and nothing is waited for between two looks."""
    for module in (flow, block_sealing):
        monkeypatch.setattr(module, "GROUP", BLOCK)
    monkeypatch.setattr(flow, "ITEM_RECORDS_MIN", 32)
    monkeypatch.setattr(order.Order.__init__, "__kwdefaults__", {"window_packs": 8})
    monkeypatch.setattr(growth, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.folder.mkdir()
    for name, count, heldout in (("one", 1, False), ("three", 3, False), ("three-heldout", 3, True)):
        made.register(name, digits(count, pages=PAGES, heldout=heldout))
    return made


@pytest.fixture
def spec(tmp_path: Path) -> TrainingJobSpec:
    tokenizer = released_tokenizer(tmp_path / "tokenizer")
    return make_spec(["one", "three"], heldout=["three-heldout"], weights=[1, 2], tokenizer=tokenizer, early=True)


def opened(home: Home, spec: TrainingJobSpec) -> PackedSource:
    return job_packs.open_source(home.objects, spec, job=JOB, wait_s=0.0)


def same(one: PackedBatch, other: PackedBatch) -> None:
    assert one.sample_ids == other.sample_ids
    for name in ("tokens_T", "targets_T", "positions_T", "document_offsets", "patches_PC", "grids_I2"):
        np.testing.assert_array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name)))


class KilledError(Exception):
    """Processing ends at this line."""


def process_killed_after(home: Home, spec: TrainingJobSpec, blocks: int, patch: pytest.MonkeyPatch) -> None:
    """Process until so many blocks are published."""
    append, left = Journal.append, itertools.count(1)

    def counted(self: Journal, *arguments: Any) -> None:
        append(self, *arguments)
        if next(left) >= blocks:
            raise KilledError

    with patch.context() as context:
        context.setattr(Journal, "append", counted)
        with pytest.raises(KilledError):
            home.process(spec, JOB)


def test_batches_and_states_are_the_same_however_many_blocks_are_sealed(
    home: Home, spec: TrainingJobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processing is killed again and again; one source reads on, another one is opened again each time."""
    with pytest.raises(EnvironmentFailedError, match="data is not processed"):
        opened(home, spec)
    read: dict[int, tuple[PackedBatch, Any]] = {}
    reader: PackedSource | None = None
    waits = 0
    for blocks in itertools.repeat(3):
        before = len(read)
        try:
            process_killed_after(home, spec, blocks, monkeypatch)
            ended = False
        except pytest.fail.Exception:
            ended = True
        reader = reader or opened(home, spec)
        fresh = opened(home, spec)
        if read:
            fresh.check_state(read[before][1])
        while len(read) < STEPS:
            step = len(read) + 1
            try:
                batch = fresh.packs(step, first=0, count=4)
            except NotSealedError:
                with pytest.raises(NotSealedError, match="need a block of samples that is not sealed yet"):
                    reader.packs(step, first=0, count=4)
                waits += 1
                break
            same(batch, reader.packs(step, first=0, count=4))
            assert fresh.state(step) == reader.state(step)
            read[step] = batch, reader.state(step)
        if ended:
            break
    assert waits > 1
    whole = opened(home, spec)
    assert len(whole._indexes[0].manifest.shards) == len(range(0, PAGES, BLOCK))
    for step in (STEPS, *range(1, STEPS + 1)):
        same(whole.packs(step, first=0, count=4), read[step][0])
    states = [opened(home, spec) for _ in range(2)]
    states[0].check_state(read[7][1])
    assert states[0].state(7) == read[7][1]
    other = json.loads(json.dumps(read[STEPS][1]))
    other["blocks"][1][1] = "0" * 64
    with pytest.raises(RefusedError, match="blocks of source s1 had other samples"):
        states[1].check_state(other)
    assert len(job_packs.open_evaluation(home.objects, spec, job=JOB) or ()) > 0


def test_the_finished_index_is_that_of_a_job_without_blocks(home: Home, spec: TrainingJobSpec) -> None:
    plain = spec.model_copy(update={"data": spec.data.model_copy(update={"start_while_processing": False})})
    in_blocks = home.process(spec, JOB)
    assert [of.manifest for of in home.process(plain, "other").datasets] == [of.manifest for of in in_blocks.datasets]


def test_ids_that_are_used_twice_and_bad_records_are_the_same_dead_letters(home: Home, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    names = [f"r{at}" if at not in {70, 150, 151} else "r3" for at in range(200)]
    lines: list[Any] = [{"id": name, "conversations": turns} for name in names]
    lines[90] = "{"
    home.register("text", write_jsonl(tmp_path / "text", lines))
    tokenizer = released_tokenizer(tmp_path / "tokenizer")
    found = []
    for early, job in ((True, "a"), (False, "b")):
        report = home.process(make_spec(["text"], tokenizer=tokenizer, early=early), job)
        found.append([(of.operation, of.ordinal, of.rule) for of in report.datasets[0].dead_letters])
    assert found[0] == found[1]
    assert [(ordinal, rule) for _, ordinal, rule in found[0]] == [(70, "id"), (90, "json"), (150, "id"), (151, "id")]


def test_a_sealed_block_never_changes_and_a_lost_shard_of_it_is_sealed_again(
    home: Home, spec: TrainingJobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_killed_after(home, spec, 1, monkeypatch)
    journal = Journal(open_store(home.objects), plan_key(JOB, plan_data(spec)))
    known = journal.block(0, 0)
    assert known is not None
    with pytest.raises(EnvironmentFailedError, match="block 0 changed"):
        journal.append(0, 0, dataclasses.replace(known, samples=known.samples - 1))
    source = opened(home, spec)
    source._steps._grow(source._steps.plan)
    [shard] = source._indexes[0].manifest.shards
    lost = home.folder / "objects" / blob_key(shard.digest)
    content = lost.read_bytes()
    lost.unlink()
    home.process(spec, JOB)
    assert lost.read_bytes() == content
    assert journal.block(0, 0) == known


def test_a_rank_learns_from_its_data_engine_that_a_step_is_not_sealed() -> None:
    error = error_of(describe_error(NotSealedError("steps 2 to 3 need a block")))
    assert (type(error), str(error)) == (NotSealedError, "steps 2 to 3 need a block")


STAGES = [{"name": "short", "steps": 50}, {"name": "long", "steps": 50, "sequenceTokens": 128}]


@pytest.mark.parametrize(
    ("data", "training", "words"),
    [
        ({"tokenizer": {"vocabulary": 512}}, {}, "set data.tokenizer.location"),
        ({}, {"stages": STAGES}, "'long' has packs of 128 tokens, the data 64"),
    ],
    ids=["a tokenizer that is trained", "packs of two lengths"],
)
def test_what_needs_all_data_first_is_refused_at_the_door(
    data: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    spec = make_spec(["one"], tokenizer={"location": "file:///t"}, early=True).model_dump(mode="json", by_alias=True)
    spec["data"] |= data
    spec["training"] |= training
    job = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}, "spec": spec}
    with pytest.raises(InvalidConfigError, match=r"data\.startWhileProcessing") as refused:
        parse_job(job)
    assert words in str(refused.value)
