"""A bug that one job meets does not stop the others."""

import asyncio

import pytest

from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.types.actions import Decision
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.snapshot import JobSnapshot
from tests.unit.operator.operator_stage import Stage

PATIENCE_S = 30.0


class Failures(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_job_failed(self, uid: str, error: Exception) -> None:
        self.seen.append(str(error))


def test_a_bug_that_one_job_meets_is_counted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(snapshot: JobSnapshot, now_s: float, **options: object) -> Decision:
        if snapshot.job.name == "cursed":
            raise LookupError("a bug of ours")
        return reconcile(snapshot, now_s, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("polyreme_operator.passes.job_decider.reconcile", buggy)
    failures = Failures()
    stage = Stage(observer=failures)

    async def story() -> None:
        for name in ("cursed", "fine"):
            stage.add_job(name)
        await asyncio.sleep(PATIENCE_S)

    stage.run(story)
    assert stage.status("fine")
    assert len(failures.seen) >= 2
    assert set(failures.seen) == {"a bug of ours"}
