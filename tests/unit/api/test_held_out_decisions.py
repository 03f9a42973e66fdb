"""What is decided by held-out losses needs them where it decides; the CRD has the same rules."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from tests.cluster.crd_evaluation_cases import BEST, EARLY, INT4
from tests.unit.api.jobs import job_with

MEASURED = {"everySteps": 20, "sets": [{"name": "a", "dataset": "x/held-out"}]}


@pytest.mark.parametrize(("changes", "words"), [(changes, words) for _, changes, words in (*BEST, *EARLY)])
def test_a_decision_without_its_loss_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_job(job_with(changes))
    assert [part for part in words if part not in str(refused.value)] == []


@pytest.mark.parametrize(("changes", "words"), [(changes, words) for _, changes, words in INT4])
def test_answers_in_4_bits_need_whole_matrices(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_job(job_with(changes))
    assert all(part in str(refused.value) for part in words)


@pytest.mark.parametrize("every", [20, 60])
def test_a_loss_at_each_checkpoint_is_accepted(every: int) -> None:
    job = parse_job(job_with({"spec.checkpoint": {"keepBest": 2, "everySteps": every}, "spec.evaluation": MEASURED}))
    assert job.spec.checkpoint.keep_best == 2
