"""What goes through JSON and text comes back the same, floats bit for bit."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.environment import PodEnvironment, RankEnvironment
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankExit, RankPhase, StepRecord
from polyreme_api.times import parse_rfc3339, rfc3339

floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(min_size=1, max_size=50).filter(lambda text: "\x00" not in text)
counts = st.integers(0, 2**31)


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


@given(floats, floats, st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_step_record_keeps_its_floats_bit_for_bit(loss: float, norm: float, rate: float) -> None:
    record = StepRecord(attempt=1, step=1, loss=loss, gradient_norm=norm, learning_rate=rate)
    line = record.model_dump_json(by_alias=True)
    assert "\n" not in line
    for again in (StepRecord.model_validate_json(line), StepRecord.model_validate(json.loads(line))):
        assert bits(again.loss) == bits(loss)
        assert bits(again.gradient_norm) == bits(norm)
        assert bits(again.learning_rate) == bits(rate)
        assert again == record


@given(st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_loss_that_is_no_number_stays_a_record_that_any_json_reader_reads(loss: float) -> None:
    line = StepRecord(attempt=1, step=1, loss=loss).model_dump_json(by_alias=True)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(line, parse_constant=refuse)
    again = StepRecord.model_validate_json(line).loss
    assert again == loss or (math.isnan(again) and math.isnan(loss))


records = st.builds(
    ProgressRecord,
    attempt=st.integers(1, 10**6),
    replacement=st.integers(0, 100),
    phase=st.sampled_from(RankPhase),
    released=st.booleans(),
    joined=counts,
    step=counts,
    steps=counts,
    loss=st.none() | floats,
    tokens_per_second=st.none() | floats,
    checkpoint=st.none() | st.builds(CheckpointRef, attempt=st.integers(1, 99), step=counts),
    resumed_from_step=st.none() | counts,
    exits=st.lists(
        st.builds(RankExit, rank=counts, code=st.none() | st.integers(0, 255), signal=st.none() | st.integers(1, 64)),
        max_size=64,
    ).map(tuple),
    outcome=st.none() | st.sampled_from(Outcome),
    message=st.text(max_size=200),
    updated_at_s=floats,
)


@pytest.mark.slow
@given(records)
def test_a_progress_record_goes_round(record: ProgressRecord) -> None:
    line = record.model_dump_json(by_alias=True)
    assert "\n" not in line
    assert ProgressRecord.model_validate_json(line) == record
    assert len(line) < 32 * 1024


@given(st.floats(min_value=0, max_value=4e9))
def test_times_go_round_to_the_microsecond(at_s: float) -> None:
    assert abs(parse_rfc3339(rfc3339(at_s)) - at_s) <= 1e-6


@given(st.floats(min_value=0, max_value=4e9), st.floats(min_value=0, max_value=4e9))
def test_times_sort_as_text(first_s: float, second_s: float) -> None:
    if rfc3339(first_s) < rfc3339(second_s):
        assert first_s < second_s


@given(
    st.builds(
        PodEnvironment,
        **dict.fromkeys(
            ("pod", "job", "namespace", "job_uid", "leader_address", "api_url", "token_file", "secret_file",
             "pod_directory", "checkpoint_url"), texts,
        ),
        **dict.fromkeys(("index", "replacement", "replicas", "devices"), counts),
    )
)  # fmt: skip
def test_a_pod_environment_goes_round(pod: PodEnvironment) -> None:
    assert PodEnvironment.parse(pod.render()) == pod


@given(
    st.builds(
        RankEnvironment,
        **dict.fromkeys(("rank", "local_rank", "world_size", "attempt", "master_port"), counts),
        **dict.fromkeys(("master_fd", "progress_fd"), st.none() | counts),
        **dict.fromkeys(("master_address", "job_file", "plan_file", "checkpoint_url"), texts),
        resume_from=st.none() | texts,
    )
)
def test_a_rank_environment_goes_round(rank: RankEnvironment) -> None:
    assert RankEnvironment.parse(rank.render()) == rank
