"""The training data in other people's loops: the same steps whatever reads them, and after a restart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from polyreme.torch_dataset import PackedDataset
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.loader import job_packs
from tests.unit.datahub.jobs import Home, make_spec, picture, write_jsonl
from tests.unit.datahub.shards_and_tables import write_shards

STEPS = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("set")
    (folder / "a.png").write_bytes(picture(28, 28))
    rows = [
        {
            "id": f"s{at}",
            "images": ["a.png"] * (at % 2),
            "conversations": [
                {"role": "user", "content": "<image>" * (at % 2) + f"what is {at}?"},
                {"role": "assistant", "content": f"it is {at}"},
            ],
        }
        for at in range(24)
    ]
    made = Home(tmp_path_factory.mktemp("home"))
    made.register("mine", write_jsonl(folder, rows))
    made.process(SPEC)
    return made


SPEC = make_spec(["mine"], packs_per_step=5, vocabulary=300)


def dataset(home: Home, spec: TrainingJobSpec = SPEC, **fields: Any) -> PackedDataset:
    return PackedDataset(home.objects, spec, **{"steps": STEPS, **fields})


def seen(batches: Iterable[dict[str, Any]]) -> list[tuple[int, bytes, bytes, list[str]]]:
    return [
        (batch["step"], batch["tokens_T"].numpy().tobytes(), batch["patches_PC"].numpy().tobytes(), batch["sample_ids"])
        for batch in batches
    ]


def test_batches_are_the_packs_of_each_step_shared_among_ranks(home: Home) -> None:
    source = job_packs.open_source(home.objects, SPEC)
    shares = [list(dataset(home, rank=rank, ranks=2)) for rank in range(2)]
    assert [batch["step"] for batch in shares[0]] == list(range(1, STEPS + 1))
    for step, parts in enumerate(zip(*shares, strict=True), start=1):
        whole = source.packs(step, first=0, count=5)
        for name in ("tokens_T", "targets_T", "positions_T", "patches_PC", "grids_I2"):
            assert torch.equal(
                torch.cat([part[name] for part in parts]), torch.from_numpy(np.asarray(getattr(whole, name)))
            )
        assert [name for part in parts for name in part["sample_ids"]] == list(whole.sample_ids)


@pytest.mark.parametrize("packs_by", ["Order", "Cost"])
def test_a_trace_names_the_steps_that_ranks_get_a_sample_in(home: Home, tmp_path: Path, packs_by: str) -> None:
    home.register("shards", write_shards(tmp_path / "shards", samples=4))
    spec = make_spec(
        ["mine", "shards"],
        packs_per_step=5,
        vocabulary=300,
        schedule=[(4, [1, 0]), (6, [1, 5])],
        augment={"mirror": {"probability": "0.5"}, "crop": {"minAreaPercent": 60}},
        packs_by=packs_by,
    )
    home.process(spec)
    source = job_packs.open_source(home.objects, spec)
    trained = Counter(
        (batch["step"], name)
        for rank in range(3)
        for batch in dataset(home, spec, rank=rank, ranks=3)
        for name in batch["sample_ids"]
    )
    names = {name for _, name in trained}
    traced = Counter(
        (turn.step, name)
        for name in names
        for step in range(1, STEPS + 1)
        for turn in source.turns(source.find(name), step)
    )
    assert traced == trained
    assert len(names) == 32
    of_shards = {step for step, name in trained if ".tar/" in name}
    assert of_shards & {1, 2, 3}, "before the mixture changed"
    assert of_shards & {6, 7}, "and after"
    assert source.find("nobody") == {}


# torchdata calls it when a loader is made.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_from_its_state_with_the_same_steps(home: Home, workers: int) -> None:
    whole = seen(dataset(home))

    def loader() -> StatefulDataLoader[dict[str, Any]]:
        return StatefulDataLoader(dataset(home), batch_size=None, num_workers=workers)

    for taken in (1, 3):
        first = loader()
        batches = iter(first)
        begun = seen(next(batches) for _ in range(taken))
        state = first.state_dict()
        del batches
        second = loader()
        second.load_state_dict(state)
        assert begun + seen(second) == whole


def test_a_state_without_a_loader_goes_on_in_any_loader_and_with_other_ranks(home: Home) -> None:
    whole = [seen(dataset(home, rank=rank, ranks=5)) for rank in range(5)]
    begun = dataset(home, rank=1, ranks=2)
    batches = iter(begun)
    for _ in range(2):
        next(batches)
    state = json.loads(json.dumps(begun.state_dict()))
    for rank, workers in ((0, 0), (4, 2)):
        after = dataset(home, rank=rank, ranks=5)
        after.load_state_dict(state)
        assert seen(DataLoader(after, batch_size=None, num_workers=workers)) == whole[rank][2:]


def test_what_does_not_fit_is_refused(home: Home) -> None:
    with pytest.raises(InvalidConfigError, match="no such rank: 2 of 2"):
        dataset(home, rank=2, ranks=2)
    with pytest.raises(InvalidConfigError, match="step 1 has 5 packs for 6 ranks"):
        next(iter(dataset(home, rank=0, ranks=6)))
    with pytest.raises(RefusedError, match="not a state of a PackedDataset"):
        dataset(home).load_state_dict({"step": 3})
    begun = dataset(home)
    next(iter(begun))
    other = dataset(home, make_spec(["mine"], packs_per_step=5, vocabulary=300, seed=4))
    other.load_state_dict(begun.state_dict())
    with pytest.raises(RefusedError, match="belongs to other data"):
        next(iter(other))
    worked = dataset(home)
    worked.load_state_dict({**begun.state_dict(), "worker": [1, 2]})
    with pytest.raises(RefusedError, match="state of worker 1 of 2, this is worker 0 of 0"):
        next(iter(worked))
