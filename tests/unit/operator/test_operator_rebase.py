"""A decided status is moved to a newer version of its job only if nothing changed that it was decided by."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.reconcile.rebase import rebased
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job


def admission_of(owner: JobView) -> WriteStatus:
    return WriteStatus(
        ref=owner.ref,
        uid=owner.uid,
        resource_version=owner.resource_version,
        before=owner.status,
        after=admit(owner, ("n0", "n0"), NOW_S),
    )


def queued(owner: JobView) -> TrainingJobStatus:
    after = StatusBuilder(owner, NOW_S)
    return after.set(ConditionType.QUEUED, True, Reason.WAITING_FOR_CAPACITY, "needs 2 devices").build()


def failed(owner: JobView) -> TrainingJobStatus:
    after = StatusBuilder(owner, NOW_S)
    return after.set(ConditionType.FAILED, True, Reason.MAX_RESTARTS_EXCEEDED, "ended").build()


def newer(owner: JobView, **changes: Any) -> JobView:
    return dataclasses.replace(owner, resource_version="9", **changes)


def test_an_admission_is_rebased_on_a_write_of_a_pending_reason() -> None:
    owner = job()
    told = newer(owner, status=queued(owner))
    moved = rebased(admission_of(owner), told)
    assert (moved.resource_version, moved.before) == ("9", told.status)
    assert moved.after == admission_of(owner).after


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 2},
        {"deleting": True},
        {"status": job().status.model_copy(update={"cancelled_admissions": 1})},
        {"status": admitted(job()).status},
        {"status": failed(job())},
    ],
    ids=["spec", "deletion", "admission taken back", "admitted meanwhile", "ended meanwhile"],
)
def test_an_admission_stays_on_its_version_when_what_it_was_decided_by_changed(changes: dict[str, Any]) -> None:
    write = admission_of(job())
    assert rebased(write, newer(job(), **changes)) is write


def test_only_admissions_are_moved() -> None:
    owner = admitted(job())
    write = dataclasses.replace(admission_of(owner), after=owner.status.model_copy(update={"step": 7}))
    assert rebased(write, newer(owner)) is write
