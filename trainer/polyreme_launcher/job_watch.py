"""The leader's view of its job: read, then watched; ``status.attempt`` with its plan is passed to the machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.job.spec import STORED, TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_api.load import rule_words
from polyreme_api.rank_state import ExchangeKind
from polyreme_launcher.api_client import ApiAwayError, ApiClient, ApiGoneError, ApiRefusedError
from polyreme_launcher.mixture_leader import changes_of
from polyreme_launcher.protocol.check_rounds import CheckOrder
from polyreme_launcher.protocol.check_verdict import ALL_REDUCE, Limits
from polyreme_launcher.protocol.hang_evidence import HangLimits
from polyreme_launcher.protocol.leader import AttemptView
from polyreme_launcher.protocol.messages import LINE_BYTES_MAX
from polyreme_planner.plan import Plan

if TYPE_CHECKING:
    from polyreme_api.job.pre_checks import PreChecks
    from polyreme_planner.layout import Layout

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
HEADROOM_BYTES = 4096
"""Most bytes that a directive's other fields take of its line."""


async def watch_attempts(
    api: ApiClient,
    *,
    job: str,
    uid: str,
    clock: Clock,
    on_attempt: Callable[[AttemptView], None],
    on_refused: Callable[[int, str], None],
    on_changes: Callable[[str], None],
) -> None:
    """Follow ``status.attempt``; returns when the job is gone.

    Args:
        api: Client.
        job: Name of the job.
        uid: Its UID.
        clock: Clock.
        on_attempt: Called for every new state.
        on_refused: Called with number and reason of an attempt that this launcher can't run.
        on_changes: Called with what of the spec may change while ranks train, as JSON: at first, and when it has.
    """
    delay_s = RETRY_FIRST_S
    seen: dict[str, Any] | None = None
    changes: str | None = None

    def take(manifest: dict[str, Any]) -> None:
        nonlocal seen, changes
        newest = json.dumps(changes_of(manifest["spec"]))
        if newest != changes:
            changes = newest
            on_changes(newest)
        attempt = (manifest.get("status") or {}).get("attempt")
        if attempt and attempt != seen:
            seen = attempt
            try:
                view = attempt_view(manifest)
            except InvalidConfigError as error:
                print(f"attempt is refused: {error}", file=sys.stderr)
                on_refused(int(attempt["number"]), str(error))
            else:
                on_attempt(view)

    while True:
        try:
            manifest = await api.job(job)
            if manifest["metadata"]["uid"] != uid:
                return
            take(manifest)
            version = manifest["metadata"]["resourceVersion"]
            delay_s = RETRY_FIRST_S
            async for state in api.watch_job(job, resource_version=version):
                if state["metadata"].get("uid") == uid:
                    take(state)
        except NotFoundError:
            return
        except (ApiAwayError, ApiRefusedError, ApiGoneError) as error:
            print(f"can't read the job, retrying: {error}", file=sys.stderr)
        await clock.sleep(delay_s)
        delay_s = min(2 * delay_s, RETRY_MAX_S)


def _layout(attempt: AttemptStatus) -> Layout:
    of = f"plan of attempt {attempt.number}"
    if not attempt.plan:
        raise InvalidConfigError(
            f"{of} is not in the job's status: the operator is older than this launcher", field="the operator's image"
        )
    try:
        read = Plan.from_json(attempt.plan)
    except InvalidConfigError as error:
        raise InvalidConfigError(
            f"{of} can't be read: {error.message}; operator and launcher are of different versions",
            field="the image of the workers",
        ) from error
    if read.hash != attempt.plan_hash:
        raise InvalidConfigError(f"{of} is damaged: its hash is {read.hash}, the status names {attempt.plan_hash}")
    return read.layout


def attempt_view(manifest: dict[str, Any]) -> AttemptView:
    """Read ``status.attempt`` with the plan that the operator put there; nothing is planned here.

    Raises:
        InvalidConfigError: If job and plan can't be read or are too long to be sent.
    """
    try:
        attempt = AttemptStatus.model_validate(manifest["status"]["attempt"])
        spec = TrainingJobSpec.model_validate(manifest["spec"], context=STORED)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidConfigError(
            f"job is of another version than this launcher: {rule_words(first)}", field=where
        ) from error
    layout = _layout(attempt)
    job = {key: manifest[key] for key in ("apiVersion", "kind", "spec")}
    job["metadata"] = {key: manifest["metadata"].get(key) for key in ("name", "namespace", "uid")}
    plan_json = attempt.plan
    if attempt.number > 1 or manifest["metadata"].get("generation", 1) > 1:
        job["spec"] = _with_fitting_schedule(job, plan_json)
    job_json = json.dumps(job)
    if (size := len(json.dumps([job_json, plan_json]))) > LINE_BYTES_MAX - HEADROOM_BYTES:
        most = LINE_BYTES_MAX - HEADROOM_BYTES
        raise InvalidConfigError(
            f"job and plan are too long for a message to the other launchers: {size} bytes, expected at most {most}",
            field="spec",
        )
    return AttemptView(
        number=attempt.number,
        run=attempt.desired == "Run",
        checkpoint_requested=attempt.checkpoint_requested,
        replicas=attempt.replicas,
        devices=attempt.devices,
        replacements=attempt.replacement_by_index,
        job_json=job_json,
        plan_json=plan_json,
        checks=_check_order(spec.pre_checks, attempt),
        hang_limits=HangLimits(
            step_s=float(spec.health.hang.stall_seconds),
            first_step_s=float(spec.health.first_step_timeout_seconds),
            data_wait_s=float(spec.data.wait_seconds),
        ),
        pp=layout.pp,
        blocks={
            ExchangeKind.STAGE: layout.world // layout.pp,
            ExchangeKind.EXPERTS: layout.ep,
            ExchangeKind.CONTEXT: layout.cp * layout.tp,
            ExchangeKind.TENSOR: layout.tp,
        },
    )


def _with_fitting_schedule(job: dict[str, Any], plan_json: str) -> dict[str, Any]:
    """Return a job's spec without the last changes of the weights if they make it too long for a message.

    The job had room when it was created, so these were appended since: as if they came later, they fail nothing.
    """
    spec: dict[str, Any] = job["spec"]
    data = spec.get("data") or {}
    entries = schedule = data.get("schedule") or []
    while entries and len(json.dumps([json.dumps({**job, "spec": spec}), plan_json])) > LINE_BYTES_MAX - HEADROOM_BYTES:
        entries = entries[: len(entries) * 9 // 10]
        spec = {**spec, "data": {**data, "schedule": entries}}
    if left_out := len(schedule) - len(entries):
        print(f"the last {left_out} changes of data.schedule are left out: the job is too long", file=sys.stderr)
    return spec


def _check_order(asked: PreChecks, attempt: AttemptStatus) -> CheckOrder | None:
    order, least = attempt.pre_checks, asked.minimums
    if order is None:
        return None
    minimums = {
        "Compute": least.compute_gflops,
        "Memory": least.memory_mb_per_second,
        "Disk": least.disk_mb_per_second,
        ALL_REDUCE: least.all_reduce_mb_per_second,
    }
    limits = Limits(
        percent_of_median=asked.min_percent_of_median,
        minimums={check: float(rate) for check, rate in minimums.items() if rate is not None},
    )
    return CheckOrder(
        timeout_s=float(asked.timeout_seconds),
        limits=limits,
        passed=order.passed_indices,
        warn_only=order.warn_only,
    )
