"""A dataset without a single good record is refused before any rank starts, if the job trains on it."""

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.processing import DatasetReport
from polyreme_datahub.registry.rows import Letter, OperationCount
from polyreme_datahub_service.usable import check_usable
from tests.unit.operator.operator_scenes import job_manifest


def spec(*sources: dict[str, Any], **data: Any) -> TrainingJobSpec:
    return parse_job(job_manifest(data={"sources": list(sources), "sequenceTokens": 128, **data})).spec


def report(name: str, samples: int, dead: int = 0) -> DatasetReport:
    letter = Letter(
        key="k", operation="decode", ordinal=0, sample_id="bad.jsonl:1", rule="image", error="not an image: 0 bytes"
    )
    return DatasetReport(
        reference=f"{name}@1",
        samples=samples,
        tokens=samples,
        manifest="m",
        operations=(OperationCount(operation="ingest"), OperationCount(operation="decode", dead=dead)),
        dead_letters=(letter,) if dead else (),
    )


ONE, TWO = {"name": "one", "dataset": "a/one"}, {"name": "two", "dataset": "a/two@1", "weight": 0}


def test_a_dataset_without_a_good_record_is_refused_with_its_dead_letters() -> None:
    with pytest.raises(InvalidConfigError, match=r"a/one@1 has no good record: 39 records are dead letters") as caught:
        check_usable(spec(ONE, TWO), [report("a/one", 0, 39), report("a/two", 5)])
    assert "bad.jsonl:1: not an image: 0 bytes" in str(caught.value)


def test_one_good_record_is_enough_and_what_no_step_trains_on_does_not_count() -> None:
    check_usable(spec(ONE, TWO), [report("a/one", 1, 38), report("a/two", 0, 3), report("a/heldout", 0, 3)])
    changes = [{"fromStep": 5, "weights": [{"source": "two", "weight": 1}]}]
    with pytest.raises(InvalidConfigError, match="a/two@1"):
        check_usable(spec(ONE, TWO, schedule=changes), [report("a/one", 1), report("a/two", 0, 3)])
