"""Ranks that are slow, not seen, or damaged: conditions, events, causes, and evidence on nodes if a job asks for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.placement import Placement
from polyreme_api.node_report import CONDITION_SLOW_RANK
from polyreme_api.progress import RankExit, RankPhase, Straggler
from polyreme_operator.node_marks import EVEN_STEPS
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.observe import find_failure
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import EmitEvent, WriteStatus
from polyreme_operator.types.reasons import Cause
from tests.unit.operator.health_stage import HealthStage
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, pod, snapshot

SLOW = Straggler(ranks=(1,), since_step=40, slowdown=1.31)
GROUP = Straggler(ranks=(2, 3), group="experts", since_step=12, slowdown=2.5)


def decided(**record: Any) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return what the conditions about ranks say, and the events."""
    owner = admitted(job(), at_s=NOW_S - 100)
    fields = {"phase": RankPhase.TRAINING, "step": 60, "watched_ranks": 2, **record}
    found = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner, seen_s=NOW_S, **fields))
    actions = reconcile(found, NOW_S, defaults=PodDefaults()).actions
    (write,) = (action for action in actions if isinstance(action, WriteStatus))
    kinds = {"StragglersFound", "HangDetectionOff"}
    shown = {each.type: (each.reason, each.message) for each in write.after.conditions if each.type in kinds}
    return shown, [action.reason for action in actions if isinstance(action, EmitEvent)]


@pytest.mark.parametrize(
    ("record", "conditions"),
    [
        ({}, {}),
        ({"watched_ranks": None}, {}),
        ({"phase": RankPhase.LOADING, "watched_ranks": 1, "stragglers": (SLOW,)}, {}),
        (
            {"stragglers": (SLOW,)},
            {
                "StragglersFound": (
                    "SlowRank",
                    "rank 1 on worker 1 on node n0 has computed 1.31 times as long as the others since step 40",
                )
            },
        ),
        (
            {"stragglers": (GROUP,)},
            {
                "StragglersFound": (
                    "SlowExchanges",
                    "exchanges of ranks 2 to 3 (experts) have taken 2.5 times as long as the others since step 12",
                )
            },
        ),
        (
            {"watched_ranks": 1},
            {
                "HangDetectionOff": (
                    "RanksUnseen",
                    "1 of 2 ranks are seen, so a hang is found by health.collectiveTimeoutSeconds alone",
                )
            },
        ),
    ],
)
def test_slow_ranks_and_a_blind_detection_are_conditions_and_events(
    record: dict[str, Any], conditions: dict[str, tuple[str, str]]
) -> None:
    shown, events = decided(**record)
    assert shown == conditions
    assert events == [reason for reason, _ in conditions.values()]


class SlowStage(HealthStage):
    """A stage with one job; this test plays its launchers."""

    def begin(self, action: str) -> None:
        self.uid = self.add_job(
            "job",
            workers={"replicas": 3, "devices": 2},
            parallelism={"mode": "Explicit", "dp": 6},
            training={"steps": 1000, "packsPerStep": 6},
            health={"stragglers": {"action": action}},
        )

    @property
    def nodes(self) -> list[str]:
        return Placement.model_validate(self.status("job")["attempt"]["placement"]).node_by_index()

    async def train(self, step: int, *slow: Straggler) -> None:
        """Report as the leader does, and wait until the operator has acted on it."""
        stragglers = [each.model_dump(by_alias=True) for each in slow]
        ran = {"joined": 3, "replacement": 0, "released": True, "phase": "Training", "loss": 1.0, "watchedRanks": 6}
        await self.report("job", self.uid, attempt=1, step=step, stragglers=stragglers, **ran)
        await asyncio.sleep(3.0)

    def mark(self, index: int) -> str | None:
        """Return the status of the condition of a worker's node."""
        conditions = self.node(self.nodes[index])["status"].get("conditions", [])
        return next((each["status"] for each in conditions if each["type"] == CONDITION_SLOW_RANK), None)


@pytest.mark.parametrize(("action", "marked"), [("Notify", None), ("Report", "True")])
def test_a_slow_rank_is_evidence_on_its_node_if_the_job_reports_it(action: str, marked: str | None) -> None:
    stage = SlowStage(8)
    stage.begin(action)

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(60, SLOW.model_copy(update={"ranks": (3,)}), GROUP)
        assert [stage.mark(index) for index in range(3)] == [None, marked, None]
        assert stage.taints(stage.nodes[1]) == [], "no policy enforces it"
        await stage.train(EVEN_STEPS - 1)
        assert stage.mark(1) == marked, "it has not trained for long without a slow rank"
        await stage.train(EVEN_STEPS)
        assert stage.mark(1) == (marked and "False")
        for later, since_step in ((200, 150), (400, 350)):
            await stage.train(later, SLOW.model_copy(update={"ranks": (3,), "since_step": since_step}))
            assert stage.mark(1) == marked
            await stage.train(later + 1)
            assert stage.mark(1) == (marked and "False"), "it is even again, in the same attempt"

    stage.run(story)


def test_a_rank_whose_parameters_differ_from_copies_is_the_cause_and_its_node_is_named() -> None:
    owner = admitted(job(), at_s=NOW_S - 100)
    exits = (RankExit(rank=0, code=ExitCode.ENVIRONMENT), RankExit(rank=1, code=ExitCode.COPIES_DIFFER))
    view = lease(owner, seen_s=NOW_S, phase=RankPhase.TRAINING, step=60, exits=exits, message="copies differ")
    found = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=view)
    assert owner.spec is not None
    failure = find_failure(found, owner.spec, NOW_S)
    assert failure is not None
    assert (failure.cause, failure.index) == (Cause.COPIES_DIFFER, 1)
    assert failure.message == "rank 1 on worker 1 on node n0 exited with code 104: copies differ"
