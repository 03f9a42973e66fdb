"""Rollbacks that would find no checkpoint from before the window are refused with the fields; the CRD has the rules."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from tests.cluster.crd_cases import ROLLBACK, ROLLBACKS
from tests.unit.api.jobs import job_with


@pytest.mark.parametrize(("changes", "words"), [(changes, words) for _, changes, words in ROLLBACKS])
def test_a_rollback_without_a_checkpoint_before_its_window_is_refused(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_job(job_with(changes))
    assert [part for part in words if part not in str(refused.value) and part != "spec:"] == []
    kept = {field: value for field, value in changes.items() if field != "spec.health"}
    parse_job(job_with(kept))  # without rollbacks it is in order


def test_a_rollback_whose_window_is_kept_is_accepted() -> None:
    parse_job(job_with({**ROLLBACK, "spec.checkpoint": {"everySteps": 50, "keep": 3}}))
    parse_job(job_with(ROLLBACK))
