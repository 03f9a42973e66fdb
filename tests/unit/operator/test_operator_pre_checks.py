"""Checks of nodes before training: what the operator does with what the launchers report."""

from __future__ import annotations

import asyncio
from typing import Any

from polyreme_api.job.placement import Placement
from tests.unit.operator.health_stage import HealthStage

FINDING = {"index": 1, "reason": "PreCheckComputeSlow", "message": "compute: 10 Gflop/s, the gang's median is 100"}


class CheckedStage(HealthStage):
    """A stage with one job that checks its nodes; this test plays its launchers."""

    def begin(self, **asked: Any) -> None:
        self.uid = self.add_job(
            "job",
            workers={"replicas": 3, "devices": 2},
            parallelism={"mode": "Explicit", "dp": 6},
            training={"steps": 1000, "packsPerStep": 6},
            preChecks={"enabled": True, **asked},
        )

    @property
    def attempt(self) -> dict[str, Any]:
        return dict(self.status("job")["attempt"])

    @property
    def nodes(self) -> list[str]:
        return Placement.model_validate(self.attempt["placement"]).node_by_index()

    async def check(self, *, fails: bool, **record: Any) -> None:
        """Report the end of the checks as the leader of the current attempt does."""
        done = {"done": True, "passed": [[0, 1], [2, 1]] if fails else [[0, 3]], "failed": [FINDING] if fails else []}
        ended = {"outcome": "Failed", "message": "worker 1: slow"} if fails else {"released": True, "phase": "Training"}
        now = {"attempt": self.attempt["number"], "joined": 3, "replacement": 0, "released": False}
        await self.report("job", self.uid, **{**now, **ended, "preCheck": done, **record})


def test_a_worker_that_fails_is_moved_before_the_first_step_and_no_budget_pays() -> None:
    stage = CheckedStage(8)
    stage.begin()

    async def story() -> None:
        await asyncio.sleep(5.0)
        assert stage.attempt["preChecks"] == {"passed": [], "warnOnly": False}
        before = stage.nodes
        await stage.check(fails=True)
        await asyncio.sleep(3.0)
        after = stage.nodes
        assert stage.attempt["number"] == 2
        assert after[1] not in before
        assert [after[0], after[2]] == [before[0], before[2]]
        [record] = stage.status("job")["restartRecords"]
        assert (record["cause"], record["index"], record["counts"]) == ("PreCheck", 1, False)
        assert "worker 1 failed a check of its node (PreCheckComputeSlow)" in record["message"]
        assert stage.condition("job", "NodesChecked")["status"] == "False"
        await stage.check(fails=False)
        await asyncio.sleep(3.0)
        assert stage.condition("job", "NodesChecked")["reason"] == "ChecksPassed"

    stage.run(story)


def test_after_the_most_moves_the_attempt_trains_in_spite_of_a_failed_check() -> None:
    stage = CheckedStage(8)
    stage.begin(maxMoves=2)

    async def story() -> None:
        for moved in range(2):
            await asyncio.sleep(30.0)
            assert (stage.attempt["number"], stage.attempt["preChecks"]["warnOnly"]) == (moved + 1, False)
            await stage.check(fails=True)
        await asyncio.sleep(30.0)
        assert (stage.attempt["number"], stage.attempt["preChecks"]["warnOnly"]) == (3, True)
        await stage.check(fails=True, outcome=None, released=True, phase="Training", message="")
        await asyncio.sleep(3.0)
        checked = stage.condition("job", "NodesChecked")
        assert (checked["status"], checked["reason"]) == ("False", "ChecksFailed")
        assert "PreCheckComputeSlow" in checked["message"]
        assert stage.condition("job", "Running")["status"] == "True"
        assert stage.events("ChecksFailed")

    stage.run(story)


def test_after_the_most_moves_the_job_fails_if_its_owner_wants_that() -> None:
    stage = CheckedStage(8)
    stage.begin(maxMoves=0, whenExhausted="Fail")

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.check(fails=True)
        await asyncio.sleep(3.0)
        failed = stage.condition("job", "Failed")
        assert (failed["status"], failed["reason"]) == ("True", "ChecksFailed")
        assert "workers were moved 0 times in a row" in failed["message"]

    stage.run(story)


def test_checks_of_places_that_the_attempt_does_not_have_move_nothing() -> None:
    stage = CheckedStage(8)
    stage.begin()

    async def story() -> None:
        await asyncio.sleep(5.0)
        report = {"done": True, "passed": [], "failed": [{**FINDING, "index": 99}]}
        await stage.check(fails=True, preCheck=report, outcome=None)
        await asyncio.sleep(3.0)
        assert stage.attempt["number"] == 1

    stage.run(story)
