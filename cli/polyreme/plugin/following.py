"""Waiting for what a change leads to: what the operator decides, and how it ends.

The rules are pure functions of a job; a status counts only if it describes the spec that was sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from polyreme.plugin.operator_lease import doubt_of, is_unseen, silence
from polyreme.plugin.reading import NotAllowedError, list_all, read_job
from polyreme.plugin.rows import message_of, reason_of, refusal_of, state_of
from polyreme.plugin.snapshot import read_view
from polyreme.views.output import note
from polyreme_api.errors import (
    EnvironmentFailedError,
    NotFoundError,
    PolyremeError,
    RefusedError,
    RunFailedError,
    WaitTimeoutError,
)
from polyreme_cluster.port import ClusterPort
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.types.parse import parse_pod
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.views import JobView

POLL_S = 0.5
LOOKS_AFTER_S = 5.0
"""How often it is checked whether an operator works."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change."""

    words: str
    error: type[PolyremeError] | None = None
    """None: what was asked for."""


Rule = Callable[[JobView], Outcome | None]
"""Returns what came of a change; None while that is not known."""


async def end(
    cluster: ClusterPort, job: JobView, words: str, rule: Rule | None, *, timeout_s: float, what: str
) -> None:
    """Report a change, then its outcome by a rule; without one, warn of an operator that is silent."""
    note(f"{job.namespace}/{job.name} {words}")
    if rule is None:
        await warn(cluster, job)
    else:
        outcome = await follow(cluster, job, rule, timeout_s=timeout_s, what=what)
        note(f"{job.namespace}/{job.name} {outcome}")


async def follow(cluster: ClusterPort, job: JobView, rule: Rule, *, timeout_s: float, what: str) -> str:
    """Wait until the outcome of a change is known, report each new state on the way, and return the outcome's words.

    Args:
        cluster: The cluster.
        job: The job as it was changed.
        rule: Tells the outcome.
        timeout_s: How long to wait.
        what: What is waited for: ``suspended``.

    Raises:
        PolyremeError: The outcome, where it is not what was asked for.
        WaitTimeoutError: If it is not known in time.
        NotFoundError: If the job is deleted.
        EnvironmentFailedError: If no operator works on the cluster.
    """
    began_s, said = time.monotonic(), ""
    looked_s = began_s
    while True:
        seen = read_view(await read_job(cluster, job.namespace, job.name))
        if seen.uid != job.uid:
            raise NotFoundError(f"job {job.namespace}/{job.name} was deleted and created again", field="JOB")
        outcome = rule(seen)
        if outcome is not None:
            if outcome.error is not None:
                raise outcome.error(f"{job.namespace}/{job.name} {outcome.words}")
            return outcome.words
        words = f"{state_of(seen)[0]}: {message_of(seen)}".rstrip(": ")
        if words != said:
            note(f"{job.namespace}/{job.name} {words}")
            said = words
        now_s = time.monotonic()
        over = now_s >= began_s + timeout_s
        if over or now_s >= looked_s + LOOKS_AFTER_S:
            looked_s = now_s
            await _check_operator(cluster, seen)
        if over:
            unseen = ", and no operator has looked at its spec yet" if is_unseen(seen) else ""
            words = f"{job.namespace}/{job.name} is not {what} after {timeout_s:g} s{unseen}"
            raise WaitTimeoutError(words, field="--timeout")
        await asyncio.sleep(min(POLL_S, began_s + timeout_s - now_s))


async def warn(cluster: ClusterPort, job: JobView) -> None:
    """Say that a change may have no effect, if no operator works on the cluster."""
    why = await silence(cluster, time.time())
    if why and (doubt := doubt_of(job, why, time.time())):
        note(f"{job.namespace}/{job.name}: {doubt}")


async def _check_operator(cluster: ClusterPort, seen: JobView) -> None:
    why = await silence(cluster, time.time())
    if why:
        raise EnvironmentFailedError(f"{seen.namespace}/{seen.name}: {doubt_of(seen, why, time.time())}")


def suspended(asked: JobView) -> Rule:
    """Return the rule for a job that was asked to suspend."""

    def rule(job: JobView) -> Outcome | None:
        if job.spec is not None and not job.spec.suspend:
            return Outcome("was resumed by another user", RefusedError)
        if job.status.is_true("Suspended") and _described(job, asked):
            return Outcome(f"is suspended; `kubectl polyreme resume {job.name}` continues it")
        return _stopped(job, "before it was suspended") or _ended(job, "before it was suspended")

    return rule


def running(asked: JobView) -> Rule:
    """Return the rule for a job that was asked to resume."""

    def rule(job: JobView) -> Outcome | None:
        if job.spec is not None and job.spec.suspend:
            return Outcome("was suspended again by another user", RefusedError)
        if job.status.is_true("Running") and job.attempt is not None and _described(job, asked):
            return Outcome(f"runs with {_workers(job.attempt.replicas)}")
        if job.status.is_true("Succeeded"):
            return Outcome("has succeeded")
        return _stopped(job, "") or _ended(job, "")

    return rule


def decided(asked: JobView, replicas: int) -> Rule:
    """Return the rule for a job that was asked to take another number of workers: whether that is accepted."""

    def rule(job: JobView) -> Outcome | None:
        if (other := _resized(job, asked, replicas)) is not None:
            return other
        if job.admitted and job.attempt is not None:
            restarting = job.status.condition("Restarting")
            stops = restarting is not None and restarting.status == "True" and restarting.reason == "Resize"
            if stops and job.attempt.desired == "Stop" and _described(job, asked):
                return Outcome(f"takes {_workers(replicas)}: it saves a checkpoint, and a new attempt starts")
            return None
        if job.status.is_true("Suspended") and _described(job, asked):
            return Outcome(f"takes {_workers(replicas)} when it is resumed")
        queued = job.status.condition("Queued")
        if queued is None or queued.status != "True" or queued.observed_generation < asked.generation:
            return None
        if queued.reason == Reason.PLANNING:
            return None
        return Outcome(f"waits for {_workers(replicas)}: {queued.reason}, {queued.message}".rstrip(", "))

    return rule


def resized(asked: JobView, replicas: int) -> Rule:
    """Return the rule for a job that was asked to take another number of workers: whether it has them."""

    def rule(job: JobView) -> Outcome | None:
        return _resized(job, asked, replicas)

    return rule


def _resized(job: JobView, asked: JobView, replicas: int) -> Outcome | None:
    if job.spec is not None and job.spec.workers.replicas != replicas:
        return Outcome(f"was scaled to {_workers(job.spec.workers.replicas)} by another user", RefusedError)
    if job.generation >= asked.generation and (refusal := refusal_of(job)):
        return Outcome(f"keeps its size: {refusal}", RefusedError)
    if job.admitted and job.attempt is not None and job.attempt.replicas == replicas and _described(job, asked):
        return Outcome(f"has {_workers(replicas)}")
    words = f"before it had {_workers(replicas)}"
    return _stopped(job, words) or _ended(job, words)


def _stopped(job: JobView, when: str) -> Outcome | None:
    """Return the outcome for a job about which the operator decides nothing any more."""
    degraded = job.status.condition("Degraded")
    if degraded is not None and degraded.status == "True":
        return Outcome(f"is left alone by the operator ({degraded.reason}): {degraded.message}", RefusedError)
    if job.deleting:
        return Outcome(f"was deleted {when}".rstrip(), RefusedError)
    return None


def _ended(job: JobView, when: str) -> Outcome | None:
    if job.status.is_true("Failed"):
        return Outcome(f"failed ({reason_of(job)}) {when}".rstrip() + f": {message_of(job)}", RunFailedError)
    if job.status.is_true("Succeeded"):
        return Outcome(f"succeeded {when}".rstrip(), RefusedError)
    return None


def _described(job: JobView, asked: JobView) -> bool:
    """Tell whether the status describes the spec that was sent."""
    return job.status.observed_generation >= asked.generation


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


async def until_gone(cluster: ClusterPort, job: JobView, *, timeout_s: float) -> str:
    """Wait until a job and its pods are gone; return why pods were not waited for.

    Raises:
        WaitTimeoutError: If they are not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            here = (await cluster.get(job.ref))["metadata"]["uid"] == job.uid
        except PortNotFoundError:
            here = False
        unseen = ""
        try:
            pods = [parse_pod(item) for item in await list_all(cluster, "Pod", namespace=job.namespace)]
        except NotAllowedError as error:
            pods, unseen = [], error.message
        left = sum(pod is not None and pod.job_uid == job.uid for pod in pods)
        if not here and not left:
            return unseen
        if time.monotonic() >= deadline_s:
            raise WaitTimeoutError(
                f"{job.namespace}/{job.name} is not gone after {timeout_s:g} s, {left} pods are left", field="--timeout"
            )
        await asyncio.sleep(POLL_S)
