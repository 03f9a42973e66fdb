"""What a verb that waits says came of a change, and by which exit code."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme.plugin import following
from polyreme.plugin.snapshot import read_view
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.types.views import JobView
from tests.unit.plugin.plugin_scenes import NOW_S, condition, job, runs, waits


def seen(status: Manifest, *, generation: int = 2, replicas: int = 99, **spec: Any) -> JobView:
    manifest = job("big", status=status, replicas=replicas, **spec)
    manifest["metadata"]["generation"] = generation
    return read_view(manifest)


ASKED = seen({})


def looked_at(status: Manifest, *more: Manifest, generation: int = 2) -> Manifest:
    conditions = [{**entry, "observedGeneration": generation} for entry in (*status.get("conditions", ()), *more)]
    return {**status, "observedGeneration": generation, "conditions": conditions}


REFUSED = condition("ResizeRefused", "NoFit", "spec.workers.replicas 99 is refused, 2 workers stay in force: no layout")
STOPS = runs("n0", "n1")
STOPS["attempt"] = {**STOPS["attempt"], "desired": "Stop"}
FAILED = {"conditions": [condition("Failed", "RunFailed", "loss is nan")]}
DONE = {"conditions": [condition("Succeeded", "Completed")]}
BROKEN = {"conditions": [condition("Degraded", "Unreadable", "status.attempt can't be read")]}
WITHDRAW = "no layout; `kubectl polyreme scale big --replicas 2` withdraws the request"


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (runs("n0", "n1"), None, 0),
        (looked_at(runs("n0", "n1")), None, 0),
        (looked_at(runs("n0", "n1"), REFUSED, generation=1), None, 0),
        (looked_at(runs("n0", "n1"), REFUSED), WITHDRAW, ExitCode.REFUSED),
        (looked_at(STOPS, condition("Restarting", "Resize")), "takes 99 workers: it saves a checkpoint", 0),
        (looked_at(waits("Planning")), None, 0),
        (looked_at(waits("ExceedsQuota", "needs 99"), generation=1), None, 0),
        (looked_at(waits("ExceedsQuota", "needs 99")), "waits for 99 workers: ExceedsQuota, needs 99", 0),
        (
            looked_at({**waits("WaitingForCapacity"), "replicasInForce": 2}, REFUSED),
            WITHDRAW,
            ExitCode.REFUSED,
        ),
        (looked_at({"conditions": [condition("Suspended", "Suspended")]}), "takes 99 workers when it is resumed", 0),
        (FAILED, "failed (RunFailed) before it had 99 workers: loss is nan", ExitCode.RUN_FAILED),
        (DONE, "succeeded before it had 99 workers", ExitCode.REFUSED),
        (BROKEN, "is left alone by the operator (Unreadable): status.attempt can't be read", ExitCode.REFUSED),
    ],
)
def test_scale_reports_the_operators_verdict_about_the_spec_that_was_sent(
    status: Manifest, words: str | None, code: int
) -> None:
    check(following.decided(ASKED, 99)(seen(status)), words, code)


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (looked_at(STOPS, condition("Restarting", "Resize")), None, 0),
        (looked_at(runs("n0", "n1", "n2")), "has 3 workers", 0),
        (runs("n0", "n1", "n2"), None, 0),
    ],
)
def test_scale_with_wait_ends_when_the_job_has_the_workers(status: Manifest, words: str | None, code: int) -> None:
    check(following.resized(ASKED, 3)(seen(status, replicas=3)), words, code)
    other = following.resized(ASKED, 3)(seen(status, replicas=4))
    check(other, "was scaled to 4 workers by another user", ExitCode.REFUSED)


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (runs("n0", "n1"), None, 0),
        (looked_at(runs("n0", "n1")), "runs with 2 workers", 0),
        (looked_at(waits("ExceedsQuota")), None, 0),
        (looked_at({"conditions": [condition("Suspended", "Suspended")]}, generation=1), None, 0),
        (FAILED, "failed (RunFailed): loss is nan", ExitCode.RUN_FAILED),
        (DONE, "has succeeded", 0),
        (BROKEN, "is left alone by the operator", ExitCode.REFUSED),
    ],
)
def test_resume_says_that_a_job_runs_only_when_it_does(status: Manifest, words: str | None, code: int) -> None:
    check(following.running(ASKED)(seen(status)), words, code)
    check(following.running(ASKED)(seen(status, suspend=True)), "was suspended again by another user", ExitCode.REFUSED)


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (looked_at(STOPS), None, 0),
        (looked_at({"conditions": [condition("Suspended", "Suspended")]}, generation=1), None, 0),
        (looked_at({"conditions": [condition("Suspended", "Suspended")]}), "is suspended; `kubectl polyreme resume", 0),
        (FAILED, "failed (RunFailed) before it was suspended: loss is nan", ExitCode.RUN_FAILED),
        (DONE, "succeeded before it was suspended", ExitCode.REFUSED),
    ],
)
def test_suspend_says_that_a_job_is_suspended_only_when_it_is(status: Manifest, words: str | None, code: int) -> None:
    check(following.suspended(ASKED)(seen(status, suspend=True)), words, code)


def check(outcome: following.Outcome | None, words: str | None, code: int) -> None:
    assert (outcome is None) is (words is None), outcome
    if outcome is not None and words is not None:
        assert words in outcome.words
        assert (0 if outcome.error is None else outcome.error.exit_code) == code


async def test_a_verb_that_waits_ends_where_no_operator_works() -> None:
    cluster = EmbeddedCluster(Store(new_uid=lambda: "u", now_s=lambda: NOW_S))
    made = await cluster.create({**job("big"), "metadata": {"name": "big", "namespace": "team"}, "status": {}})
    asked = read_view(made)
    with pytest.raises(EnvironmentFailedError, match=r"no operator has looked at this job: is one installed\?"):
        await following.follow(cluster, asked, following.running(asked), timeout_s=0, what="running")
