"""Device time of a job's status sums to wall time x devices, whatever happens to job, clock and operator."""

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.accounting import table_of
from polyreme_api.progress import CheckpointRef, ProgressRecord
from polyreme_api.times import parse_rfc3339
from polyreme_local.api_server.record import merge
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.transition import admit, begin_attempt
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.types.views import JobView
from polyreme_operator.writer import status_patch
from tests.unit.operator.operator_scenes import NOW_S, job

SIZES = (1, 2, 4)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "what": st.sampled_from(("start", "ready", "settle", "restart", "resize", "stop", "suspend", "succeed")),
            "after_s": st.one_of(st.floats(0, 3_000), st.floats(-50, 5)),
            "size": st.sampled_from(SIZES),
            "cause": st.sampled_from(tuple(Cause)),
            "steps": st.integers(0, 400),
            "durable": st.floats(0, 1),
            "step_s": st.floats(0, 20),
            "others_s": st.floats(0, 900),
        }
    ),
    max_size=14,
)


def record_of(view: JobView, event: dict[str, Any]) -> ProgressRecord:
    attempt = view.status.attempt
    number = 1 if attempt is None else attempt.number
    return ProgressRecord(
        attempt=number,
        step=event["steps"],
        step_seconds=event["step_s"],
        trained_seconds=event["step_s"] * event["steps"],
        data_wait_seconds=event["others_s"] / 3,
        checkpoint_seconds=event["others_s"] / 2,
        evaluation_seconds=event["others_s"],
        checkpoint=CheckpointRef(attempt=number, step=int(event["durable"] * event["steps"])),
    )


def apply(view: JobView, event: dict[str, Any], now_s: float) -> TrainingJobStatus:
    """The status after an event, as the operator builds it."""
    what, nodes, after = event["what"], ["n0"] * event["size"], StatusBuilder(view, now_s)
    if not view.admitted:
        if what == "start":
            return admit(view, nodes, now_s, plan=view.plan_at(event["size"]))
        if what == "suspend":
            after.close_wait().set(ConditionType.SUSPENDED, not view.status.is_true(ConditionType.SUSPENDED), "R")
        return after.build()
    record, ended_by = record_of(view, event), None if what == "succeed" else event["cause"]
    if what == "ready":
        after.set(ConditionType.PODS_READY, True, Reason.JOINED).set(ConditionType.RUNNING, True, Reason.TRAINING)
    if what in {"ready", "settle", "start", "suspend"}:
        return after.settle(record, idle_s=event["others_s"]).build()
    after.close_attempt(record, ended_by=ended_by, hung_s=event["others_s"])
    if what in {"restart", "resize"}:
        plan = view.plan_at(event["size"]) if what == "resize" else None
        kept = ["n0"] * view.status.attempt.replicas if view.status.attempt is not None else nodes
        scope = Scope.RESIZE if what == "resize" else Scope.GANG
        begin_attempt(after, nodes=kept if plan is None else nodes, replace=(), scope=scope, plan=plan)
    else:
        after.withdraw(Reason.EVICTED)
    return after.build()


def _ms(at: str) -> int:
    return round(parse_rfc3339(at) * 1000)


@given(events=EVENTS)
@settings(max_examples=150)
def test_device_time_sums_to_wall_time_times_devices(events: list[dict[str, Any]]) -> None:
    """Every write is followed by an operator that knows nothing but what is stored."""
    view = job(replicas=2, workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 4})
    stored: dict[str, Any] = {}
    now_s, spent, attempts_ms, until_ms = NOW_S, 0, 0, round(view.created_s * 1000)
    for event in events:
        now_s += event["after_s"]
        before = view.status
        held = before.attempt.replicas if view.admitted and before.attempt else 2
        stored = merge(stored, status_patch(before, apply(view, event, now_s)))
        after = TrainingJobStatus.model_validate(stored)
        view = dataclasses.replace(view, status=after)
        accounts = after.accounting
        if accounts.until:
            assert _ms(accounts.until) >= until_ms
            spent += (_ms(accounts.until) - until_ms) * held
            attempts_ms += (_ms(accounts.until) - until_ms) * (before.is_true("Admitted"))
            until_ms = _ms(accounts.until)
        open_cells = table_of([] if accounts.settled is None else accounts.settled.cells)
        assert sum(accounts.table.values()) - open_cells.total() == spent
        if accounts.settled is not None and after.attempt is not None:
            assert open_cells.total() <= (_ms(accounts.settled.at) - until_ms) * held
        assert all(accounts.table.get(pair, 0) >= time for pair, time in before.accounting.table.items())
        charged = sum(day.held_device_milliseconds + day.queued_device_milliseconds for day in accounts.days)
        assert charged == sum(accounts.table.values()) - accounts.table.get(("Queued", "Suspend"), 0)
        by_cause_ms = accounts.effective_milliseconds + sum(entry.milliseconds for entry in accounts.lost)
        assert by_cause_ms == attempts_ms + open_cells.total() // held
