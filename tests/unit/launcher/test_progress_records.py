"""Records on a Lease that forbid another launcher to write its own."""

import select

import pytest

from polyreme_api.progress import (
    LAYERS_MAX,
    NOTICE_CHARACTERS_MAX,
    CheckpointRef,
    ProgressRecord,
    RankPhase,
    RoutingByLayer,
)
from polyreme_launcher.protocol.messages import Exited
from polyreme_launcher.protocol.records import cause_of, with_rank_record


@pytest.mark.parametrize(
    ("known", "own", "outdated"),
    [
        ({"attempt": 2}, {"attempt": 1}, True),
        ({"attempt": 1, "replacement": 1}, {"attempt": 1}, True),
        ({"attempt": 1, "released": True}, {"attempt": 1}, True),
        ({"attempt": 1, "released": True}, {"attempt": 1, "released": True}, False),
        ({"attempt": 1}, {"attempt": 1, "released": True}, False),
        ({"attempt": 1, "released": True}, {"attempt": 1, "replacement": 1}, False),
        ({"attempt": 1, "released": True}, {"attempt": 2}, False),
    ],
)
def test_a_record_outdates_those_of_launchers_of_the_past(
    known: dict[str, int], own: dict[str, int], outdated: bool
) -> None:
    assert ProgressRecord.model_validate(known).outdates(ProgressRecord.model_validate(own)) is outdated


def test_the_longest_record_of_a_rank_is_one_that_a_pipe_takes_whole() -> None:
    """Lines of more than ``PIPE_BUF`` bytes may be torn; a model with more layers tells nothing of its routing."""
    full = RoutingByLayer(
        first_layer=10,
        load_max=(123.4567,) * LAYERS_MAX,
        entropy=(12.3456,) * LAYERS_MAX,
        dropped=(1_234_567_890,) * LAYERS_MAX,
    )
    record = ProgressRecord(
        attempt=100_000,
        phase=RankPhase.CHECKPOINTING,
        step=100_000_000,
        steps=100_000_000,
        stage="s" * 63,
        loss=1.2345678901234567,
        held_out_loss=1.2345678901234567,
        held_out_step=100_000_000,
        tokens_per_second=1234567.8901234567,
        step_seconds=1.2345678901234567,
        checkpoint=CheckpointRef(attempt=100_000, step=100_000_000),
        resumed_from_step=100_000_000,
        routing=full,
        notice="n" * NOTICE_CHARACTERS_MAX,
        updated_at_s=1764000000.1234567,
    )
    assert len(record.model_dump_json(by_alias=True)) + 1 <= select.PIPE_BUF
    said = with_rank_record(ProgressRecord(attempt=100_000, joined=3), record)
    assert (said.routing, said.stage, said.held_out_step, said.joined) == (full, "s" * 63, 100_000_000, 3)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([7, 1], 1), ([7, 1, 8], 2), ([7, 7], 0), ([1, 7], 0)],
    ids=["killed or failed", "damaged data", "only lost peers", "in order"],
)
def test_message_is_that_of_the_cause_and_not_of_a_rank_that_lost_it(codes: list[int], expected: int) -> None:
    exits = [Exited(attempt=1, rank=at, code=code, signal=None, message=str(at)) for at, code in enumerate(codes)]
    assert cause_of(exits) == str(expected)
