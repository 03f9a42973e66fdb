"""Packs that are assigned to ranks by cost have the losses and the gradient of packs in the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_datahub.loader.open import open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE
from tests.unit.datahub.jobs import Home, digits, make_spec, record, write_jsonl

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STEPS = (1, 2, 3)
DATASETS = ("pages", "words")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Pages with an image each, and text of other lengths without."""
    home = Home(tmp_path_factory.mktemp("home"))
    words = [record(f"text-{at}", conversations=talk(1 + at % 9)) for at in range(60)]
    home.register("pages", digits(3, pages=60))
    home.register("words", write_jsonl(home.folder / "words", words))
    home.process(make_spec(DATASETS, **PACKED))
    return home


PACKED: dict[str, Any] = {"sequence_tokens": 128, "packs_per_step": 7, "seed": 2}


def talk(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": "other " * words}]


@pytest.mark.parametrize(
    ("images_over", "microbatches"), [("Context", 1), ("Data", 2)], ids=["one microbatch", "images balanced too"]
)
def test_losses_and_gradients_are_those_of_the_order(
    start: Any, tmp_path: Path, home: Home, images_over: str, microbatches: int
) -> None:
    specs = {by: make_spec(DATASETS, packs_by=by, **PACKED) for by in ("Order", "Cost")}
    split = StepSplit(data_ranks=2, microbatches=microbatches)
    sources = [
        open_packs(home.objects, spec, job="", wait_s=0.0, sleep=sleep_really, split=split) for spec in specs.values()
    ]
    moved = [len({str(source.packs(step, first=0, count=4).sample_ids) for source in sources}) for step in STEPS]
    assert moved == [2] * len(STEPS), "rank 0 has other packs"
    assert sources[0].state(2) == sources[1].state(2)
    seen = {
        by: gradients(
            start,
            tmp_path / by,
            {"dp": 2},
            steps=len(STEPS),
            objects=home.objects,
            job=spec.model_dump(mode="json", by_alias=True),
            images_over=images_over,
            pipeline={"microbatches": microbatches},
        )
        for by, spec in specs.items()
    }
    # Seven packs on one rank; on two, one of the eight places has a null pack.
    seen["alone"] = gradients(
        start,
        tmp_path / "alone",
        (1, 1),
        steps=len(STEPS),
        objects=home.objects,
        job=specs["Order"].model_dump(mode="json", by_alias=True),
    )
    for by in ("Order", "Cost"):
        assert seen[by]["biases"] == seen["alone"]["biases"]
        assert seen[by]["losses"] == pytest.approx(seen["alone"]["losses"], rel=TOLERANCE)
        assert largest_difference(seen[by], seen["alone"]) <= TOLERANCE
    assert seen["Cost"]["losses"] == pytest.approx(seen["Order"]["losses"], rel=TOLERANCE)
    assert largest_difference(seen["Cost"], seen["Order"]) <= TOLERANCE
    assert (max(seen["Cost"]["moved"]) > 0) == (images_over == "Data")
