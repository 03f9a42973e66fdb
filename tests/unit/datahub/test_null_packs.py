"""Null packs, at the places that a step has no packs for, and packs that are empty."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from polyreme_api.batch import IGNORED_TARGET
from polyreme_api.errors import RefusedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.sample.documents import Document, assemble
from tests.unit.datahub.jobs import Home, digits, make_spec


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    home.register("one", digits(1, pages=60))
    home.register("three", digits(3, pages=60))
    return home


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, StepSplit(3), StepSplit(3, 2)], ids=str)
def test_null_packs_fill_the_places_that_a_step_has_no_packs_for(home: Home, split: StepSplit | None) -> None:
    """They are the last ones of a rank's, teach nothing and hold no sample; each pack of the step comes once."""
    given = make_spec(["one", "three"], weights=[1, 1], packs_per_step=4, packs_by="Cost" if split else "Order")
    home.process(given)
    source = open_packs(home.objects, given, job="", wait_s=0.0, sleep=sleep_really, split=split)
    tokens = given.data.sequence_tokens
    alone = [list(job_packs.open_source(home.objects, given).packs(2, first=at, count=1).sample_ids) for at in range(4)]
    found = []
    for rank in range(3):
        mine = source.packs(2, first=2 * rank, count=2)
        bounds = np.asarray(mine.document_offsets)
        padding = {int(bounds[at]): int(bounds[at + 1]) for at in mine.padding_documents}
        real = sum(tokens for pack in range(2) if pack * tokens not in padding)
        grids = source.grids(2, first=2 * rank, count=2)
        assert sum(map(len, grids)) == sum(map(len, grids[: real // tokens])) == len(np.asarray(mine.grids_I2))
        assert (np.asarray(mine.targets_T)[real:] == IGNORED_TARGET).all()
        assert real in bounds
        assert [at for at in bounds[:-1] if at >= real] == [at for at in padding if at >= real]
        assert (
            sum(stop - at for at, stop in padding.items()) == (np.asarray(mine.tokens_T) == source.token_ids.pad).sum()
        )
        assert np.diff(bounds[bounds >= real]).max(initial=0) <= 128
        found += list(mine.sample_ids)
    assert sorted(found) == sorted(itertools.chain(*alone))
    with pytest.raises(RefusedError, match=r"no packs 8\.\.9: step 2 has 4"):
        source.packs(2, first=8, count=1)


def test_all_that_is_no_sample_is_padding() -> None:
    """What is left of a pack, a pack that a window had no samples for, a null pack, a damaged sample's placeholder."""
    document = Document(
        np.array([7, 8]), np.array([8, -100]), np.zeros((0, 588), np.uint8), np.zeros((0, 2), np.int32), "one", 1
    )
    gone = dataclasses.replace(document, sample_id="placeholder:two", placeholder=True)
    batch = assemble([[], [document, gone, document], [], []], pack_tokens=200, pad=0, values=588, null=1).joined()
    assert np.asarray(batch.tokens_T)[200:206].tolist() == [7, 8] * 3
    assert np.asarray(batch.document_offsets).tolist() == [0, 200, 202, 204, 206, 400, 600, 728, 800]
    assert list(batch.padding_documents) == [0, 2, 4, 5, 6, 7]
    earlier = assemble(
        [[], [document, gone], [], []], pack_tokens=200, pad=0, values=588, null=1, marks_padding=False
    ).joined()
    assert list(earlier.padding_documents) == [5, 6], "of jobs of earlier releases null packs alone"
    full = assemble([[document] * 2], pack_tokens=4, pad=0, values=588).joined()
    assert list(full.padding_documents) == []
