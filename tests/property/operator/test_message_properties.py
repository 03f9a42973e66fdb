"""Messages that others write, however long and whatever is in them, never keep a status from being written."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyreme_api.fields import MESSAGE_CHARACTERS_MAX
from polyreme_api.job import TrainingJobStatus
from polyreme_api.times import rfc3339
from polyreme_operator.placement.topology import ProblemReason, TopologyProblem, arrange
from polyreme_operator.publishing.queue_status import topology_status
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from polyreme_operator.types.views import PodPhase, TopologyView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, node, pod, snapshot

LONG = MESSAGE_CHARACTERS_MAX + 1
ELLIPSIS = "…"
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(categories=("L", "P", "S", "Z", "C", "Cs")), max_size=40),
    st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=9), st.integers(LONG // 9, LONG * 2)),
)


def failed_pod(text: str) -> JobSnapshot:
    owner = admitted(job(failurePolicy={"maxRestarts": 9}))
    ended = pod(owner, 1, phase=PodPhase.FAILED, exit_code=3, reason=text, message=text)
    return snapshot(owner, pods=(pod(owner, 0), ended), lease=lease(owner, step=3))


def failed_pod_that_may_not_restart(text: str) -> JobSnapshot:
    owner = admitted(job(failurePolicy={"maxRestarts": 0}))
    ended = pod(owner, 1, phase=PodPhase.FAILED, exit_code=3, message=text)
    return snapshot(owner, pods=(pod(owner, 0), ended), lease=lease(owner, step=3))


def pod_without_room(text: str) -> JobSnapshot:
    """It waits for its next try, so this pass writes."""
    owner = admitted(job(), ("n0", "n1"))
    owner = dataclasses.replace(owner, status=owner.status.model_copy(update={"retry_at": rfc3339(NOW_S + 5)}))
    pending = pod(owner, 1, where="", phase=PodPhase.PENDING, unschedulable_since_s=NOW_S - 99, unschedulable=text)
    return snapshot(owner, pods=(pod(owner, 0), pending), lease=lease(owner, released=False))


def said_by_a_rank(text: str) -> JobSnapshot:
    owner = admitted(job())
    words = lease(owner, step=3, exits=[{"rank": 1, "code": 1}])
    assert words.record is not None
    record = words.record.model_copy(update={"message": text})
    return snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=dataclasses.replace(words, record=record))


def waiting(text: str) -> JobSnapshot:
    return snapshot(job(), pending=Pending(Reason.WAITING_FOR_NODES, text))


def kept_at_its_size(text: str) -> JobSnapshot:
    owner = admitted(job(replicas=2))
    bigger = dataclasses.replace(job(replicas=3), status=owner.status)
    return snapshot(bigger, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner), refused=text)


def unreadable(text: str) -> JobSnapshot:
    return snapshot(dataclasses.replace(job(), spec=None, plans=(), invalid=text))


def without_a_plan(text: str) -> JobSnapshot:
    return snapshot(dataclasses.replace(job(), plans=(), invalid=text))


SCENES: tuple[Callable[[str], JobSnapshot], ...] = (
    failed_pod,
    failed_pod_that_may_not_restart,
    pod_without_room,
    said_by_a_rank,
    waiting,
    kept_at_its_size,
    unreadable,
    without_a_plan,
)


@pytest.mark.parametrize("built", SCENES)
@given(text=texts)
@example("x" * 5000)
@example("\ud800")
@settings(max_examples=30)
def test_every_message_is_bounded_and_written_once(built: Callable[[str], JobSnapshot], text: str) -> None:
    seen = built(text)
    before = seen.job.status
    write = written(seen)
    assert write is not None
    assert TrainingJobStatus.model_validate_json(write.after.model_dump_json(by_alias=True)) == write.after
    said = set(messages(write.after)) - set(messages(before))
    assert all(len(message) <= MESSAGE_CHARACTERS_MAX for message in said)
    if len(text) >= LONG:
        assert any(message.endswith(ELLIPSIS) for message in said)
    if write.after.attempt == before.attempt and not write.after.finished:
        again = dataclasses.replace(seen, job=dataclasses.replace(seen.job, status=write.after))
        assert written(again) is None


@given(text=texts)
@example("x" * 5000)
@settings(max_examples=30)
def test_a_move_is_recorded_whatever_its_scheduler_said(text: str) -> None:
    owner = admitted(job(), ("n0", "n1"))
    pending = pod(owner, 1, where="", phase=PodPhase.PENDING, unschedulable_since_s=NOW_S - 99, unschedulable=text)
    views = (node(), node("n1"), node("n2"))
    batch = schedule(
        cluster_of(jobs=(owner,), pods=(pod(owner, 0), pending), nodes=views, leases_read=frozenset({owner.uid})),
        NOW_S,
    )
    (write,) = batch.writes
    (record,) = write.after.restart_records
    assert len(record.message) <= MESSAGE_CHARACTERS_MAX
    assert record.message.endswith(ELLIPSIS) or len(text) < LONG


@given(text=texts)
@settings(max_examples=30)
def test_a_topologys_problem_is_bounded_too(text: str) -> None:
    problem = TopologyProblem(reason=ProblemReason.NO_NODES, message=text)
    arrangement = dataclasses.replace(arrange({}, ()), problems=(problem,))
    (write,) = topology_status(TopologyView(name="default"), arrangement, now_s=NOW_S)
    assert len(write.status["conditions"][0]["message"]) <= MESSAGE_CHARACTERS_MAX


def written(seen: JobSnapshot) -> WriteStatus | None:
    actions: tuple[Any, ...] = reconcile(seen, NOW_S, defaults=PodDefaults()).actions
    return next((action for action in actions if isinstance(action, WriteStatus)), None)


def messages(status: TrainingJobStatus) -> Iterator[str]:
    yield from (condition.message for condition in status.conditions)
    yield from (record.message for record in status.restart_records)
