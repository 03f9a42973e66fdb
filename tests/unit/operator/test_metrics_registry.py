"""What the metrics make of accepted statuses, rounds and calls."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polyreme_api.job.accounting import Accounting, TimeCell
from polyreme_api.job.status import Preemption, RestartRecord
from polyreme_api.progress import ProgressRecord, RoutingByLayer, Straggler
from polyreme_api.times import rfc3339
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.instrumented_client import InstrumentedCluster, code_of
from polyreme_cluster.port import ConflictError, NotFoundError, ObjectRef, PortTimeoutError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.options import parse
from polyreme_operator.publishing.cycle_metrics import OTHER_QUEUES, QUEUES_MAX
from polyreme_operator.publishing.job_metrics import GOODPUT_JOBS_MAX
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.publishing.training_metrics import TRAINING_JOBS_MAX
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.service import _Shell
from polyreme_operator.types.observer import CycleReport, Observer, Observers
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from polyreme_system.clock import SystemClock
from tests.contract.manifests import config
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, snapshot
from tools import metrics_page


def read(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_report_has_a_metric() -> None:
    counted = {name for group in Metrics().observers for name in vars(type(group)) if name.startswith("on_")}
    reports = [{name for name in vars(kind) if name.startswith("on_")} for kind in (Observer, Observers)]
    assert counted == reports[0] == reports[1]


def test_a_report_reaches_every_group_of_metrics_that_counts_it() -> None:
    metrics, view = Metrics(), admitted(job("one"))
    accounting = spent(Productive=1)
    metrics.on_status_written(view, view.status.model_copy(update={"accounting": accounting}), now_s=NOW_S)
    metrics.on_job_observed(told(view, trained(1)))
    own = {"namespace": view.namespace, "job": view.name}
    assert read(metrics, "polyreme_job_goodput_ratio", **own) == 1
    assert read(metrics, "polyreme_job_step", **own) == 1
    metrics.on_job_deleted(view.uid)
    assert b'job="one"' not in metrics.render()


def test_an_admission_is_timed_from_when_the_job_entered_the_queue() -> None:
    metrics, waiting = Metrics(), job(queueName="team-a")
    queued = StatusBuilder(waiting, NOW_S - 40).set(ConditionType.QUEUED, True, Reason.EXCEEDS_QUOTA)
    waiting = dataclasses.replace(waiting, status=queued.build())
    metrics.on_status_written(waiting, admit(waiting, ("n0", "n0"), NOW_S), now_s=NOW_S)
    assert read(metrics, "polyreme_admission_wait_seconds_sum", queue="team-a") == pytest.approx(40)
    at_once = job("at-once", queueName="team-a", created=rfc3339(NOW_S - 2))
    metrics.on_status_written(at_once, admit(at_once, ("n0", "n0"), NOW_S), now_s=NOW_S)
    assert read(metrics, "polyreme_admission_wait_seconds_sum", queue="team-a") == pytest.approx(42)
    assert read(metrics, "polyreme_admission_wait_seconds_count", queue="team-a") == 2


def ready(view: JobView, *kinds: ConditionType, now_s: float) -> JobView:
    after = StatusBuilder(view, now_s)
    for kind in kinds:
        after.set(kind, True, Reason.JOINED)
    return dataclasses.replace(view, status=after.build())


def test_a_start_is_timed_from_its_attempt_until_every_worker_has_joined() -> None:
    metrics, view = Metrics(), admitted(job(), at_s=NOW_S - 30)
    after = ready(view, ConditionType.PODS_READY, now_s=NOW_S)
    metrics.on_status_written(view, after.status, now_s=NOW_S)
    assert read(metrics, "polyreme_admitted_until_ready_seconds_sum", queue="default") == pytest.approx(30)
    metrics.on_status_written(after, after.status, now_s=NOW_S + 5)
    assert read(metrics, "polyreme_admitted_until_ready_seconds_count", queue="default") == 1


def test_a_restart_is_counted_once_and_its_recovery_timed_in_phases() -> None:
    metrics, view = Metrics(), admitted(job(), at_s=NOW_S - 100)
    assert view.attempt is not None
    record = RestartRecord(attempt=1, at=rfc3339(NOW_S), cause=Cause.POD_LOST, scope=Scope.POD)
    attempt = view.attempt.model_copy(update={"number": 2, "scope": Scope.POD.value, "started_at": rfc3339(NOW_S + 1)})
    after = view.status.model_copy(update={"restart_records": [record], "attempt": attempt})
    metrics.on_status_written(view, after, now_s=NOW_S + 1)
    view = dataclasses.replace(view, status=after)
    joined = ready(view, ConditionType.PODS_READY, now_s=NOW_S + 4)
    metrics.on_status_written(view, joined.status, now_s=NOW_S + 4)
    runs = ready(joined, ConditionType.RUNNING, now_s=NOW_S + 10)
    metrics.on_status_written(joined, runs.status, now_s=NOW_S + 10)
    assert read(metrics, "polyreme_restarts_total", scope="RestartPod", cause="PodLost") == 1
    sums = {
        phase: read(metrics, "polyreme_recovery_seconds_sum", phase=phase) for phase in ("workers", "ranks", "whole")
    }
    assert sums == pytest.approx({"workers": 3, "ranks": 6, "whole": 10})
    assert read(metrics, "polyreme_admitted_until_ready_seconds_count", queue="default") is None


def test_an_eviction_is_counted_by_its_reason_and_an_end_is_none() -> None:
    metrics, view = Metrics(), admitted(job())
    metrics.on_status_written(view, StatusBuilder(view, NOW_S).withdraw(Reason.PREEMPTED).build(), now_s=NOW_S)
    assert read(metrics, "polyreme_evictions_total", reason="Preempted") == 1
    ended = StatusBuilder(view, NOW_S).withdraw(Reason.FINISHED)
    ended.set(ConditionType.SUCCEEDED, True, Reason.COMPLETED)
    metrics.on_status_written(view, ended.build(), now_s=NOW_S)
    assert read(metrics, "polyreme_evictions_total", reason="Finished") is None


def test_a_job_that_is_asked_to_make_way_is_counted_once() -> None:
    metrics, view = Metrics(), admitted(job())
    asked = Preemption(by="u", requested_at=rfc3339(NOW_S), deadline=rfc3339(NOW_S + 60), reclaim=True)
    after = view.status.model_copy(update={"preemption": asked})
    metrics.on_status_written(view, after, now_s=NOW_S)
    metrics.on_status_written(dataclasses.replace(view, status=after), after, now_s=NOW_S)
    assert read(metrics, "polyreme_preemptions_total", reason="Reclaimed") == 1


def spent(**milliseconds: int) -> Accounting:
    """Accounts by what the devices' time was spent on; all but steps because of a hang."""
    cells = [
        TimeCell(what=what, why="" if what == "Productive" else "Hung", device_milliseconds=ms)
        for what, ms in milliseconds.items()
    ]
    return Accounting(cells=cells)


def test_device_time_is_counted_once_by_what_and_why() -> None:
    metrics, view = Metrics(), admitted(job())
    first = spent(Productive=9_000, Hang=1_000, Queued=2_000)
    after = view.status.model_copy(update={"accounting": first})
    metrics.on_status_written(view, after, now_s=NOW_S)
    assert read(metrics, "polyreme_lost_gpu_seconds_total", cause="Hung") == pytest.approx(1.0)
    assert read(metrics, "polyreme_device_seconds_total", queue="default", what="Queued", cause="Hung") == 2.0
    assert read(metrics, "polyreme_job_goodput_ratio", namespace="default", job="j") == pytest.approx(0.9)
    assert read(metrics, "polyreme_job_ettr_ratio", namespace="default", job="j") == pytest.approx(0.75)
    second = spent(Productive=9_000, Hang=1_500, Queued=2_000)
    view = dataclasses.replace(view, status=after)
    metrics.on_status_written(view, after.model_copy(update={"accounting": second}), now_s=NOW_S)
    assert read(metrics, "polyreme_lost_gpu_seconds_total", cause="Hung") == pytest.approx(1.5)
    metrics.on_job_deleted(view.uid)
    assert read(metrics, "polyreme_job_goodput_ratio", namespace="default", job="j") is None


def test_series_stay_bounded() -> None:
    metrics = Metrics()
    lost = spent(Productive=1, Hang=1)
    for number in range(GOODPUT_JOBS_MAX + 3):
        view = admitted(job(f"j{number}"))
        metrics.on_status_written(view, view.status.model_copy(update={"accounting": lost}), now_s=NOW_S)
    assert read(metrics, "polyreme_job_goodput_ratio", namespace="default", job="j2") is None
    assert read(metrics, "polyreme_job_goodput_ratio", namespace="default", job="j3") == 0.5
    many = {(f"q{number:05d}", "BehindOthers"): 1 for number in range(QUEUES_MAX + 7)}
    metrics.on_cycle_finished(CycleReport(cycle_s=0.1, waiting=many))
    assert read(metrics, "polyreme_pending_jobs", queue=OTHER_QUEUES, reason="BehindOthers") == 7


def test_a_round_replaces_what_the_last_one_said() -> None:
    metrics = Metrics()
    waiting = {("a", "ExceedsQuota"): 2}
    metrics.on_cycle_finished(CycleReport(cycle_s=0.002, placement_s=(0.1, 0.2), waiting=waiting, objects={"Pod": 9}))
    metrics.on_cycle_finished(CycleReport(cycle_s=0.002, used={("a", "gpu"): 8}, quota={("a", "gpu"): 16}))
    assert read(metrics, "polyreme_pending_jobs", queue="a", reason="ExceedsQuota") is None
    assert read(metrics, "polyreme_queue_used", queue="a", resource="gpu") == 8
    assert read(metrics, "polyreme_queue_quota", queue="a", resource="gpu") == 16
    assert read(metrics, "polyreme_scheduling_cycle_seconds_count") == 2
    assert read(metrics, "polyreme_placement_seconds_count") == 2
    assert read(metrics, "polyreme_model_objects", kind="Pod") == 9


def test_a_replica_that_no_longer_leads_exports_no_gauge() -> None:
    metrics = Metrics()
    with metrics.leading():
        assert read(metrics, "polyreme_leader") == 1
        metrics.on_cycle_finished(CycleReport(cycle_s=0.002, waiting={("a", "ExceedsQuota"): 2}, objects={"Pod": 9}))
        for family in list(metrics.registry.collect()):
            if family.type == "gauge" and not family.samples:
                described = next(each for each in metrics.described if each.name == family.name)
                attribute = family.name.removeprefix("polyreme_")
                group = next(group for group in metrics.observers if hasattr(group, attribute))
                getattr(group, attribute).labels(*described.labels).set(7)
    gauges = [family for family in metrics.registry.collect() if family.type == "gauge"]
    shown = {sample.name: sample.value for family in gauges for sample in family.samples}
    assert set(shown.values()) == {0}
    assert "polyreme_leader" in shown
    assert "polyreme_model_objects" not in shown


def test_the_leading_replica_says_so_until_its_term_ends() -> None:
    store = Store(new_uid=iter(map(str, range(100))).__next__, now_s=lambda: NOW_S)
    metrics = Metrics()
    port = InstrumentedCluster(EmbeddedCluster(store), metrics)
    connection = Connection(url="http://127.0.0.1:1", tls=None, authorization=lambda: None)
    shell = _Shell(parse([], {}), connection, port, metrics, SystemClock())

    async def term() -> None:
        task = asyncio.ensure_future(shell._lead(lambda: True))
        async with asyncio.timeout(60):
            while not read(metrics, "polyreme_scheduling_cycle_seconds_count"):
                await asyncio.sleep(0.01)
        assert read(metrics, "polyreme_leader") == 1
        assert read(metrics, "polyreme_model_objects", kind="Pod") is not None
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(term())
    assert read(metrics, "polyreme_leader") == 0
    assert read(metrics, "polyreme_model_objects", kind="Pod") is None


def test_two_operators_in_one_process_share_nothing() -> None:
    one, two = Metrics(), Metrics()
    one.leads(True)
    assert read(two, "polyreme_leader") == 0


def test_the_text_can_be_read_back() -> None:
    metrics = Metrics()
    metrics.requested("get", "Pod", "404")
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    (sample,) = [entry for entry in families["polyreme_api_requests"].samples if entry.name.endswith("_total")]
    assert sample.labels == {"verb": "get", "kind": "Pod", "code": "404"}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConflictError("x"), "409"), (NotFoundError("x"), "404"), (PortTimeoutError("x"), "timeout")],
)
def test_calls_are_counted_by_how_they_ended(error: ConflictError, code: str) -> None:
    assert code_of(error) == code


async def test_a_counted_cluster_passes_everything_through() -> None:
    metrics = Metrics()
    store = Store(new_uid=lambda: "uid", now_s=lambda: NOW_S)
    cluster = InstrumentedCluster(EmbeddedCluster(store), metrics)
    made = await cluster.create(config("one"))
    ref = ObjectRef.of(made)
    await cluster.patch(ref, {"data": {"a": "b"}})
    assert (await cluster.get(ref))["data"] == {"a": "b"}
    assert len((await cluster.list("ConfigMap")).items) == 1
    await cluster.delete(ref, uid=made["metadata"]["uid"])
    with pytest.raises(NotFoundError):
        await cluster.get(ref)
    counted = {
        (verb, code): read(metrics, "polyreme_api_requests_total", verb=verb, kind="ConfigMap", code=code)
        for verb, code in [("create", "200"), ("patch", "200"), ("get", "200"), ("get", "404"), ("delete", "200")]
    }
    assert counted == dict.fromkeys(counted, 1.0)


def test_the_page_of_metrics_is_what_is_served() -> None:
    page = Path(__file__).parents[3] / "docs/reference/metrics.md"
    assert page.read_text() == metrics_page.render(), "run make docs"


def test_every_metric_is_served_under_the_name_that_the_page_says() -> None:
    metrics = Metrics()
    served = {line.split()[2] for line in metrics.render().decode().splitlines() if line.startswith("# TYPE")}
    assert {metric.name for metric in metrics.described} == {name for name in served if not name.endswith("_created")}


def told(view: JobView, record: ProgressRecord) -> JobSnapshot:
    return snapshot(view, lease=dataclasses.replace(lease(view), record=record))


def trained(step: int, **more: object) -> ProgressRecord:
    routing = RoutingByLayer(first_layer=1, load_max=(1.5, 2.0), entropy=(3.0, 2.5), dropped=(0, 7))
    return ProgressRecord(attempt=1, step=step, loss=2.0 / step, routing=routing).model_copy(update=more)


def test_what_ranks_say_of_their_newest_step_is_shown_by_job_and_by_layer() -> None:
    metrics, view = Metrics(), admitted(job("big"))
    own = {"namespace": view.namespace, "job": view.name}
    metrics.on_job_observed(told(view, ProgressRecord(attempt=1)))
    metrics.on_job_observed(told(view, trained(9, attempt=2)))
    assert read(metrics, "polyreme_job_step", **own) is None, "no step yet, and none of another attempt"
    metrics.on_job_observed(told(view, trained(4, held_out_loss=0.75, held_out_step=4)))
    metrics.on_job_observed(told(view, trained(5)))
    assert read(metrics, "polyreme_job_step", **own) == 5
    assert read(metrics, "polyreme_job_loss", **own) == pytest.approx(0.4)
    assert read(metrics, "polyreme_job_held_out_loss", **own) == 0.75
    assert read(metrics, "polyreme_job_expert_load_ratio", **own, layer="2") == 2.0
    metrics.on_job_observed(told(view, trained(6, objective={"rewardMargin": 0.5, "pairAccuracy": 1.0})))
    assert read(metrics, "polyreme_job_objective", **own, measure="rewardMargin") == 0.5
    metrics.on_job_observed(told(view, trained(7, objective={"other": 2.0})))
    assert read(metrics, "polyreme_job_objective", **own, measure="rewardMargin") is None, "of a stage that ended"
    assert read(metrics, "polyreme_job_objective", **own, measure="other") == 2.0
    assert read(metrics, "polyreme_job_router_entropy_nats", **own, layer="1") == 3.0
    assert read(metrics, "polyreme_job_rows_dropped", **own, layer="2") == 7
    assert read(metrics, "polyreme_job_stragglers", **own) == 0
    slow = Straggler(ranks=(1,), since_step=3, slowdown=1.4)
    metrics.on_job_observed(told(view, trained(8, stragglers=(slow,), watched_ranks=1)))
    assert read(metrics, "polyreme_job_stragglers", **own) == 1
    assert read(metrics, "polyreme_job_watched_ranks_ratio", **own) == 0.5
    metrics.on_job_deleted(view.uid)
    assert b'job="big"' not in metrics.render()


def test_jobs_with_series_of_their_training_are_bounded_and_a_replica_that_follows_has_none() -> None:
    metrics = Metrics()
    for number in range(TRAINING_JOBS_MAX + 3):
        metrics.on_job_observed(told(admitted(job(f"job-{number}")), trained(1)))
    metrics.on_job_observed(told(admitted(job("job-3")), trained(2)))
    metrics.on_job_observed(told(admitted(job("one-more")), trained(1)))
    shown = {name for name in metrics.render().decode().splitlines() if name.startswith("polyreme_job_rows_dropped{")}
    assert len(shown) == 2 * TRAINING_JOBS_MAX
    assert any('job="job-3"' in line for line in shown)
    assert not any('job="job-4"' in line for line in shown), "the one that was told of longest ago makes way"
    metrics.leads(False)
    assert b'job="job-3"' not in metrics.render()
