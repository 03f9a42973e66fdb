"""A report on a job's data is bounded, names its data, and is never read as one on another spec."""

from typing import Any

import pytest

from polyreme_api.data_report import (
    ANNOTATION_DATA,
    OPERATIONS_MAX,
    REPORT_BYTES_MAX,
    DataReport,
    DataState,
    OperationProgress,
    data_digest,
    read_report,
)
from polyreme_api.job import parse_job
from tests.unit.operator.operator_scenes import job_manifest


def digest(**spec: Any) -> str:
    return data_digest(parse_job(job_manifest(**spec)).spec)


def data(**fields: Any) -> dict[str, Any]:
    return {**job_manifest()["spec"]["data"], **fields}


def test_a_report_comes_back_as_it_was_written() -> None:
    report = DataReport(
        state=DataState.PROCESSING,
        about="a",
        progress=(OperationProgress(operation="decode", done=400, total=1000),),
        message="m",
        plan="plans/x.json",
    )
    assert read_report({ANNOTATION_DATA: report.to_annotation()}) == (report, "")
    assert read_report({}) == read_report(None) == (None, "")


def test_a_report_is_bounded_whatever_it_says() -> None:
    progress = tuple(
        OperationProgress(operation="\N{PILE OF POO}" * 63, done=2**53 - 2, total=2**53 - 1)
        for _ in range(OPERATIONS_MAX)
    )
    report = DataReport(
        state=DataState.FAILED, about="a" * 64, progress=progress, message="\N{PILE OF POO}" * 1024, plan="p" * 256
    )
    text = report.to_annotation()
    assert len(text.encode()) <= REPORT_BYTES_MAX
    read, why = read_report({ANNOTATION_DATA: text})
    assert why == ""
    assert read is not None
    assert (read.state, read.about, read.plan) == (report.state, report.about, report.plan)


@pytest.mark.parametrize(
    "spec",
    [
        {"data": data(sources=[{"name": "a", "dataset": "other/data"}])},
        {"data": data(sequenceTokens=256)},
        {"data": data(tokenizer={"vocabulary": 400})},
        {"model": {"preset": "kimi-vl-tiny"}},
        {"evaluation": {"sets": [{"name": "h", "dataset": "sample/receipts-heldout"}]}},
    ],
    ids=str,
)
def test_another_data_spec_has_another_digest(spec: dict[str, Any]) -> None:
    assert digest(**spec) != digest()


def test_what_does_not_change_the_data_does_not_change_the_digest() -> None:
    assert digest(data=data(onDamage="Placeholder", packsBy="Cost", waitSeconds=5)) == digest()
    assert digest(data=data(augment={"color": {}})) == digest()
    change = {"fromStep": 9, "weights": [{"source": data()["sources"][0]["name"], "weight": 2}]}
    assert digest(data=data(schedule=[change])) == digest()
    sources = [{**source, "augment": {"color": {}}} for source in data()["sources"]]
    assert digest(data=data(sources=sources)) == digest()
    assert digest(priority=7, replicas=4) == digest()
    assert digest(data=data(tokenizer={"vocabulary": 512})) == digest(), "the default"
