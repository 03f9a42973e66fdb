"""What of an attempt's time is effective when the attempt fails."""

from typing import Any

import pytest

from polyreme_api.job.status import Accounting
from polyreme_api.progress import ProgressRecord
from polyreme_operator.core.accounting import close_attempt
from polyreme_operator.types.reasons import Cause
from tests.unit.operator.operator_scenes import NOW_S, admitted, job


def closed(wall_s: int = 100, ended_by: Cause | None = Cause.RANK_KILLED, **record: Any) -> Accounting:
    """The accounts of a second attempt that ran for ``wall_s`` and reached step 30 at one second a step."""
    status = admitted(job(), at_s=NOW_S - wall_s).status
    given = {"attempt": 2, "step": 30, "resumedFromStep": 20, "stepSeconds": 1.0, **record}
    return close_attempt(status, ProgressRecord.model_validate(given), ended_by=ended_by, now_s=NOW_S).accounting


@pytest.mark.parametrize(
    ("checkpoint", "kept_s", "again_s"),
    [
        (None, 0, 10),
        ({"attempt": 2, "step": 26}, 6, 4),
        ({"attempt": 2, "step": 30}, 10, 0),
        ({"attempt": 1, "step": 26}, 0, 10),
    ],
    ids=["none", "own", "own, of the last step", "of an older attempt"],
)
def test_only_steps_before_a_checkpoint_of_the_attempt_itself_are_effective(
    checkpoint: dict[str, int] | None, kept_s: int, again_s: int
) -> None:
    accounts = closed(checkpoint=checkpoint)
    lost = {entry.cause: entry.milliseconds for entry in accounts.lost}
    assert accounts.effective_milliseconds == 1000 * kept_s
    assert lost.get("RankKilled", 0) == 1000 * again_s
    assert lost["Starting"] == 1000 * 90


def test_an_attempt_that_ends_well_keeps_all_its_steps() -> None:
    accounts = closed(ended_by=None, checkpoint={"attempt": 1, "step": 20})
    assert accounts.effective_milliseconds == 10_000
    assert [(entry.cause, entry.milliseconds) for entry in accounts.lost] == [("Starting", 90_000)]


def test_steps_never_take_longer_than_their_attempt() -> None:
    accounts = closed(wall_s=7, checkpoint={"attempt": 2, "step": 26})
    lost = {entry.cause: entry.milliseconds for entry in accounts.lost}
    assert (accounts.effective_milliseconds, lost) == (6_000, {"RankKilled": 1_000})
