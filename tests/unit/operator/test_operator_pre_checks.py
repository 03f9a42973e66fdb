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


def test_nodes_are_marked_and_those_that_passed_are_not_checked_again_until_the_mark_is_old() -> None:
    stage = CheckedStage(8)
    stage.begin(maxAgeSeconds=20)

    async def story() -> None:
        await asyncio.sleep(5.0)
        first = stage.nodes
        await stage.check(fails=True)
        await asyncio.sleep(3.0)
        assert [mark(stage, name) for name in first] == [
            ("False", "PreCheckPassed"),
            ("True", "PreCheckComputeSlow"),
            ("False", "PreCheckPassed"),
        ]
        assert stage.attempt["preChecks"]["passed"] == [[1, 1], [0, 1], [1, 1]]
        assert stage.taints(first[1]) == [], "no policy enforces it"
        await stage.check(fails=False)
        await asyncio.sleep(3.0)
        await stage.check(fails=False, exits=[{"rank": 1, "code": 1}])
        await asyncio.sleep(3.0)
        assert (stage.attempt["number"], stage.attempt["preChecks"]["passed"]) == (3, [[1, 3]])
        await asyncio.sleep(22.0)
        unchecked = {"done": True, "passed": [], "failed": []}
        await stage.check(fails=False, exits=[{"rank": 1, "code": 1}], preCheck=unchecked)
        await asyncio.sleep(10.0)
        assert stage.attempt["number"] == 4
        assert stage.attempt["preChecks"]["passed"] == []

    stage.run(story)


def test_a_policy_that_enforces_the_class_takes_the_node_out_of_service() -> None:
    stage = CheckedStage(8)
    stage.add_policy(classes=["performance"], breaker={"nodesPercent": 100})
    stage.begin()

    async def story() -> None:
        await asyncio.sleep(5.0)
        first = stage.nodes
        await stage.check(fails=True)
        await asyncio.sleep(5.0)
        assert stage.out() == [first[1]]
        assert stage.attempt["number"] == 2

    stage.run(story)


def test_a_worker_is_not_moved_to_a_node_that_has_failed() -> None:
    stage = CheckedStage(6)
    stage.begin(maxMoves=5)

    async def story() -> None:
        await asyncio.sleep(5.0)
        seen = [stage.nodes[1]]
        for _ in range(2):
            await stage.check(fails=True)
            await asyncio.sleep(30.0)
            seen.append(stage.nodes[1])
        assert len(set(seen)) == 3, "five free nodes, two of them failed"

    stage.run(story)


def mark(stage: CheckedStage, name: str) -> tuple[str, str]:
    found = [each for each in stage.node(name)["status"]["conditions"] if each["type"] == "polyreme.dev/PreCheck"]
    return found[0]["status"], found[0]["reason"]


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
