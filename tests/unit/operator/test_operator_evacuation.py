"""Workers leave nodes that were taken out of service: at once, after a checkpoint, or when their job ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyreme_api.job.placement import Placement
from tests.unit.operator.health_stage import HealthStage


class EvacuationStage(HealthStage):
    """A stage with one job whose launchers this test plays."""

    def begin(self, *, workers: int = 3, classes: tuple[str, ...] = ("gpu-lost",), **asked: Any) -> None:
        self.add_policy(classes=list(classes), breaker={"nodesPercent": 100})
        parallel = {"mode": "Explicit", "dp": workers * 2}
        self.uid = self.add_job(
            "job",
            workers={"replicas": workers, "devices": 2},
            parallelism=parallel,
            training={"steps": 1000, "packsPerStep": workers * 2},
            failurePolicy={"onNodeFault": asked},
        )

    @property
    def attempt(self) -> dict[str, Any]:
        return dict(self.status("job")["attempt"])

    @property
    def nodes(self) -> list[str]:
        return Placement.model_validate(self.attempt["placement"]).node_by_index()

    async def train(self, step: int, **record: Any) -> None:
        """Renew the Lease as the leader of the current attempt does."""
        now = {"attempt": self.attempt["number"], "joined": self.attempt["replicas"], "phase": "Training"}
        await self.report("job", self.uid, step=step, **now, **record)


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_now_moves_the_workers_at_once_and_the_others_keep_their_nodes(faulty: int) -> None:
    stage = EvacuationStage(8)
    stage.begin(action="Now")

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        before = stage.nodes
        for name in before[:faulty]:
            stage.show(name)
        await asyncio.sleep(2.0)
        assert stage.attempt["number"] == 2
        after = stage.nodes
        assert after[faulty:] == before[faulty:]
        assert not set(after) & set(before[:faulty])
        records = stage.status("job")["restartRecords"]
        assert [(record["cause"], record["counts"]) for record in records] == [("NodeFault", False)]

    stage.run(story)


def test_checkpoint_saves_first_and_moves_then() -> None:
    stage = EvacuationStage(8)
    stage.begin(action="Checkpoint")

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        before = stage.nodes
        stage.show(before[1])
        await asyncio.sleep(2.0)
        attempt = stage.attempt
        assert (attempt["number"], attempt["desired"], attempt["checkpointRequested"]) == (1, "Stop", True)
        assert stage.condition("job", "Restarting")["reason"] == "NodeFault"
        await stage.train(12, outcome="Stopped", checkpoint={"attempt": 1, "step": 12})
        await asyncio.sleep(2.0)
        assert (stage.attempt["number"], stage.attempt["desired"]) == (2, "Run")
        assert [stage.nodes[at] == before[at] for at in range(3)] == [True, False, True]
        assert stage.status("job")["lastCheckpoint"]["step"] == 12
        assert "restartRecords" not in stage.status("job") or not stage.status("job")["restartRecords"]

    stage.run(story)


@pytest.mark.parametrize("action", ["Now", "Checkpoint"])
@pytest.mark.parametrize("faulty", [2, 8, 16])
def test_any_part_of_a_gang_up_to_all_of_it_moves_in_one_attempt(faulty: int, action: str) -> None:
    stage = EvacuationStage(34)
    stage.begin(workers=16, action=action)

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        before = stage.nodes
        for name in before[:faulty]:
            stage.show(name)
        await asyncio.sleep(3.0)
        if action == "Checkpoint":
            assert (stage.attempt["number"], stage.attempt["desired"]) == (1, "Stop")
            await stage.train(12, outcome="Stopped", checkpoint={"attempt": 1, "step": 12})
            await asyncio.sleep(2.0)
        assert (stage.attempt["number"], stage.attempt["desired"]) == (2, "Run")
        assert stage.nodes[faulty:] == before[faulty:]
        assert not set(stage.nodes) & set(before[:faulty])

    stage.run(story)


def test_ranks_that_do_not_stop_are_moved_at_the_deadline() -> None:
    stage = EvacuationStage(8)
    stage.begin(action="Checkpoint", deadlineSeconds=10)

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        stage.show(stage.nodes[0])
        for second in range(9):
            await asyncio.sleep(1.0)
            await stage.train(11 + second)
            assert stage.attempt["number"] == 1
        await asyncio.sleep(4.0)
        assert stage.attempt["number"] == 2

    stage.run(story)


def test_finish_stays_until_its_deadline_and_then_saves() -> None:
    stage = EvacuationStage(8)
    stage.begin(action="Finish", deadlineSeconds=30)

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        stage.show(stage.nodes[0])
        for second in range(25):
            await asyncio.sleep(1.0)
            await stage.train(11 + second)
        assert stage.attempt["desired"] == "Run"
        await asyncio.sleep(8.0)
        assert stage.attempt["desired"] == "Stop"

    stage.run(story)


def test_without_room_near_the_others_the_gang_waits_with_its_checkpoint() -> None:
    stage = EvacuationStage(4)
    stage.begin()

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        stage.show(stage.nodes[0])
        await asyncio.sleep(2.0)
        await stage.train(12, outcome="Stopped", checkpoint={"attempt": 1, "step": 12})
        await asyncio.sleep(2.0)
        assert stage.condition("job", "Admitted")["status"] == "False"
        assert "no room" in stage.condition("job", "Admitted")["message"]

    stage.run(story)


def test_a_fault_in_a_class_that_is_not_enabled_moves_no_job() -> None:
    stage = EvacuationStage(8)
    stage.begin(classes=("kernel",), action="Now")

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        stage.show(stage.nodes[0])
        await asyncio.sleep(5.0)
        assert stage.attempt["number"] == 1

    stage.run(story)
