"""What of an attempt's time is effective when the attempt fails, and while it continues."""

import dataclasses
from collections import Counter
from typing import Any

import pytest

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.accounting import Accounting
from polyreme_api.job.status import RestartRecord
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import accounting
from polyreme_operator.reconcile.accounting import SETTLE_EVERY_S, close_attempt
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.types.actions import Decision, WriteStatus
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, pod, snapshot, written


def settle(status: TrainingJobStatus, record: ProgressRecord | None, **options: Any) -> TrainingJobStatus:
    """Settle an attempt whose overhead is still of the same kind."""
    return accounting.settle(status, record, use=accounting.overhead(status), **options)


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


@pytest.mark.parametrize(
    ("checkpoint", "waited_s", "expected"),
    [(30, 4.0, (6, 4)), (25, 4.0, (3, 2)), (30, 400.0, (0, 10))],
    ids=["all retained", "half of them", "more than there was"],
)
def test_time_that_retained_steps_waited_for_data_is_lost_to_a_cause_of_its_own(
    checkpoint: int, waited_s: float, expected: tuple[int, int]
) -> None:
    accounts = closed(checkpoint={"attempt": 2, "step": checkpoint}, dataWaitSeconds=waited_s)
    lost = {entry.cause: entry.milliseconds for entry in accounts.lost}
    assert (accounts.effective_milliseconds, lost["DataWait"]) == (1000 * expected[0], 1000 * expected[1])
    assert accounts.effective_milliseconds + sum(lost.values()) == 100_000


def test_a_settled_wait_for_data_is_not_counted_again_when_the_attempt_ends() -> None:
    def waits(step: int, waited_s: float) -> ProgressRecord:
        return trains(step, saved=step).model_copy(update={"data_wait_seconds": waited_s})

    settled = settle(admitted(job(), at_s=NOW_S).status, waits(700, 70.0), now_s=NOW_S + 900)
    assert sums(settled) == (630, {"DataWait": 70, "Starting": 200})
    ended = close_attempt(settled, waits(1400, 100.0), ended_by=None, now_s=NOW_S + 1600)
    assert sums(ended) == (1300, {"DataWait": 100, "Starting": 200})


def trains(step: int, *, saved: int = 0, step_s: float = 1.0) -> ProgressRecord:
    given = {"attempt": 1, "step": step, "stepSeconds": step_s, "checkpoint": {"attempt": 1, "step": saved}}
    return ProgressRecord.model_validate(given)


def sums(status: TrainingJobStatus) -> tuple[int, dict[str, int]]:
    """Effective seconds, and lost ones by cause."""
    accounts = status.accounting
    return accounts.effective_milliseconds // 1000, {entry.cause: entry.milliseconds // 1000 for entry in accounts.lost}


def cells(status: TrainingJobStatus) -> dict[str, int]:
    """Device-seconds by what they were spent on."""
    found: Counter[str] = Counter()
    for cell in status.accounting.cells:
        found[cell.what] += cell.device_milliseconds // 1000
    return dict(found)


def test_an_attempt_in_progress_is_settled_every_so_often() -> None:
    begun = admitted(job(), at_s=NOW_S).status
    assert settle(begun, trains(700, saved=500), now_s=NOW_S + SETTLE_EVERY_S - 1) is begun
    assert settle(begun, None, now_s=NOW_S + SETTLE_EVERY_S) is begun
    first = settle(begun, trains(700, saved=500), now_s=NOW_S + 900)
    # 200 s of steps since the checkpoint are neither kept nor lost yet.
    assert sums(first) == (500, {"Starting": 200})
    assert settle(first, trains(1500, saved=1400), now_s=NOW_S + 900 + SETTLE_EVERY_S - 1) is first
    second = settle(first, trains(1500, saved=1400), now_s=NOW_S + 1800)
    assert sums(second) == (1400, {"Starting": 300})


@pytest.mark.parametrize(
    ("ended_by", "expected"),
    [(None, (1900, {"Starting": 300})), (Cause.RANK_KILLED, (1400, {"RankKilled": 500, "Starting": 300}))],
)
def test_what_was_settled_is_not_counted_again_when_the_attempt_ends(
    ended_by: Cause | None, expected: tuple[int, dict[str, int]]
) -> None:
    settled = settle(admitted(job(), at_s=NOW_S).status, trains(700, saved=500), now_s=NOW_S + 900)
    ended = close_attempt(settled, trains(1900, saved=1400), ended_by=ended_by, now_s=NOW_S + 2200)
    assert sums(ended) == expected
    assert ended.accounting.settled is None
    assert (
        sums(
            close_attempt(
                admitted(job(), at_s=NOW_S).status, trains(1900, saved=1400), ended_by=ended_by, now_s=NOW_S + 2200
            )
        )
        == expected
    )


def test_what_was_settled_never_shrinks_and_the_parts_sum_up_to_the_time() -> None:
    status = settle(admitted(job(), at_s=NOW_S).status, trains(700, saved=600, step_s=1.0), now_s=NOW_S + 900)
    assert sums(status) == (600, {"Starting": 200})
    for record in (trains(700, saved=600, step_s=0.5), None):
        ended = close_attempt(status, record, ended_by=Cause.NODE_LOST, now_s=NOW_S + 1000)
        kept_s, lost = sums(ended)
        assert kept_s >= 600
        assert lost["Starting"] >= 200
        assert kept_s + sum(lost.values()) == 1000


def test_sums_of_an_operator_of_0_1_0_become_device_time() -> None:
    """With what it had settled of the attempt in progress, which is not counted twice."""
    begun = admitted(job(), at_s=NOW_S).status
    kept = [{"cause": "NodeLost", "milliseconds": 70_000}, {"cause": "Starting", "milliseconds": 60_000}]
    settled = {"attempt": 1, "at": rfc3339(NOW_S + 900), "effectiveMilliseconds": 500_000, "cause": "Starting"}
    old = {"effectiveMilliseconds": 800_000, "lost": kept, "settled": {**settled, "lostMilliseconds": 50_000}}
    status = begun.model_copy(update={"accounting": Accounting.model_validate(old)})
    assert status.accounting.goodput == "0.8602"
    ended = close_attempt(status, trains(700, saved=700), ended_by=None, now_s=NOW_S + 1000)
    assert sums(ended) == (1000, {"NodeLost": 70, "Starting": 310})
    assert cells(ended) == {"Productive": 2000, "Recomputed": 140, "Starting": 120, "WaitingForPods": 500}


def test_a_wait_is_charged_once_when_its_cause_changes() -> None:
    """Paused because of its loss for 100 s, then suspended by its user for 50 s, then in the queue again."""
    after = StatusBuilder(admitted(job(), at_s=NOW_S), NOW_S).close_attempt(None, ended_by=Cause.LOSS_SPIKE)
    record = RestartRecord(attempt=1, at=rfc3339(NOW_S), cause=Cause.LOSS_SPIKE.value, scope="RestartGang")
    after.record_restart(record).withdraw(Reason.LOSS_SPIKES).set(ConditionType.SUSPENDED, True, Reason.LOSS_SPIKES)
    view = dataclasses.replace(job(), status=after.build())
    view = dataclasses.replace(view, status=written_or(view, decide(snapshot(view), NOW_S + 60)))
    assert waited(view.status) == {"Starting": 1600}, "nothing is charged while the pause lasts"
    paused, user = view.status, job(suspend=True)
    view = dataclasses.replace(
        user, status=written(decide(snapshot(dataclasses.replace(user, status=paused)), NOW_S + 100))
    )
    assert waited(view.status) == {"Starting": 1600, "LossSpike": 200}
    assert not any(isinstance(action, WriteStatus) for action in decide(snapshot(view), NOW_S + 120).actions)
    resumed = written(decide(snapshot(dataclasses.replace(job(), status=view.status)), NOW_S + 150))
    assert waited(resumed) == {"Starting": 1600, "LossSpike": 200, "Suspend": 100}
    assert resumed.accounting.ettr == "0.0000"


def written_or(view: JobView, decision: Decision) -> TrainingJobStatus:
    """The status that a decision writes, or the known one."""
    return next((action.after for action in decision.actions if isinstance(action, WriteStatus)), view.status)


def waited(status: TrainingJobStatus) -> dict[str, int]:
    """Device-seconds without devices, by cause."""
    return {cell.why: cell.device_milliseconds // 1000 for cell in status.accounting.cells if cell.what == "Queued"}


def test_time_that_may_be_a_hangs_is_left_open() -> None:
    begun, record = admitted(job(), at_s=NOW_S).status, trains(300, saved=300)
    settled = settle(begun, record, now_s=NOW_S + 900, idle_s=400)
    assert sums(settled) == (300, {"Starting": 200})
    ended = close_attempt(settled, record, ended_by=Cause.HUNG, now_s=NOW_S + 1000, hung_s=500)
    assert sums(ended) == (300, {"Hung": 500, "Starting": 200})


def test_a_running_job_settles_by_itself_and_wakes_for_it() -> None:
    owner = admitted(job(), at_s=NOW_S - 100)
    pods = tuple(pod(owner, index) for index in range(2))
    saved = {"attempt": 1, "step": 50}
    said: dict[str, Any] = {"phase": "Training", "step": 60, "stepSeconds": 1.0, "checkpoint": saved}
    quiet = snapshot(owner, pods=pods, lease=dataclasses.replace(lease(owner, **said), advanced_seen_s=NOW_S))
    view = dataclasses.replace(owner, status=written(decide(quiet)))
    assert sums(view.status) == (50, {"Starting": 40}), "its pods are ready: the wait for them is over"
    again = decide(dataclasses.replace(quiet, job=view))
    assert again.actions == ()
    due_s = NOW_S + SETTLE_EVERY_S
    newest = dataclasses.replace(lease(owner, seen_s=due_s, **said), advanced_seen_s=due_s)
    heard = snapshot(view, pods=pods, lease=newest)
    assert decide(heard, due_s - 1).actions == ()
    assert decide(heard, due_s - 1).wake_at_s == due_s
    status = written(decide(heard, due_s))
    assert sums(status) == (50, {"Starting": 100 + int(SETTLE_EVERY_S) - 60})
    assert cells(status) == {"Queued": 1_400, "Productive": 100, "WaitingForPods": 80, "Starting": 1_800}
    later = decide(dataclasses.replace(heard, job=dataclasses.replace(view, status=status)), due_s)
    assert later.actions == ()
    assert later.wake_at_s is not None
    assert later.wake_at_s > due_s
