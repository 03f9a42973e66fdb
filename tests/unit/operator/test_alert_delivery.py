"""Alerts reach a real HTTP server at least once, signed, over its outage and a change of leaders."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.status import RestartRecord
from polyreme_api.times import rfc3339
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import NodeState, Record
from polyreme_operator.options import parse
from polyreme_operator.publishing import alerts
from polyreme_operator.publishing.alerts import Alert, AlertKind, AlertQueue, alerts_of_job
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.service import alerting
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView
from polyreme_operator.webhook import Webhook
from polyreme_system.clock import SystemClock
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, snapshot
from tools.cluster.servers import free_ports

SECRET_PATH = "/hooks/T0-secret"


class FastClock(SystemClock):
    """A clock at a fixed time whose waits take no time."""

    def now_s(self) -> float:
        return NOW_S

    async def sleep(self, delay_s: float) -> None:
        del delay_s
        await asyncio.sleep(0)


class Receiver:
    """A server that takes alerts, and answers as a test says."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], dict[str, str], bytes]] = []
        self.answers: list[int] = []

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        status = self.answers.pop(0) if self.answers else 204
        self.got.append((json.loads(body), dict(request.headers), body))
        return web.Response(status=status)

    @contextlib.asynccontextmanager
    async def open(self, port: int = 0) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_post(SECRET_PATH, self.take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def delivering(folder: Path, counted: list[str]) -> AsyncIterator[AlertQueue]:
    webhook = Webhook(folder=folder, runbook_url="https://wiki.example/alerts")
    async with aiohttp.ClientSession() as session:
        queue = AlertQueue(FastClock(), lambda alert: webhook.deliver(session, alert), counted.append)
        task = asyncio.ensure_future(queue.run())
        try:
            yield queue
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def failed() -> JobView:
    view = admitted(job())
    after = StatusBuilder(view, NOW_S).finish(succeeded=False, reason=Reason.RUN_FAILED, message="loss is nan")
    return dataclasses.replace(view, status=after.build())


def test_an_alert_is_delivered_over_an_outage_and_by_the_next_leader_with_the_same_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver, counted = Receiver(), list[str]()
    (tmp_path / "key").write_text("shared-key\n")

    async def story() -> None:
        (port,) = free_ports(1)  # no process listens there yet
        (tmp_path / "url").write_text(f"http://127.0.0.1:{port}{SECRET_PATH}\n")
        async with delivering(tmp_path, counted) as queue:
            queue.on_job_observed(snapshot(failed()))
            queue.on_job_observed(snapshot(failed()))
            await until(lambda: counted.count("Retried") >= 3)
            receiver.answers = [503, 302]
            async with receiver.open(port):
                await until(lambda: "Delivered" in counted)
        async with receiver.open(port), delivering(tmp_path, counted) as successor:
            successor.on_job_observed(snapshot(failed()))
            await until(lambda: counted.count("Delivered") == 2)

    asyncio.run(asyncio.wait_for(story(), 30))
    assert len({body for _, _, body in receiver.got}) == 1
    assert len(receiver.got) == 4, "refused, redirected, taken; taken again from the next leader"
    payload, headers, body = receiver.got[0]
    assert payload == {
        "version": 1,
        "id": headers["Polyreme-Event-Id"],
        "kind": "JobFailed",
        "at": rfc3339(NOW_S),
        "subject": {"kind": "TrainingJob", "namespace": "default", "name": "j", "uid": "uid-j"},
        "reason": "RunFailed",
        "message": "loss is nan",
        "runbook": "https://wiki.example/alerts#polyremejobfailed",
    }
    assert headers["Polyreme-Signature"] == f"sha256={hmac.new(b'shared-key', body, hashlib.sha256).hexdigest()}"
    assert caplog.records
    assert "T0-secret" not in caplog.text
    assert "shared-key" not in caplog.text


def test_the_service_sends_what_its_operator_reports_and_counts_it(tmp_path: Path) -> None:
    receiver, metrics = Receiver(), Metrics()
    options = parse(["--webhook-secret", str(tmp_path), "--runbook-url", "https://wiki.example"], {})

    async def story() -> None:
        async with receiver.open() as port:
            (tmp_path / "url").write_text(f"http://127.0.0.1:{port}{SECRET_PATH}")
            async with alerting(options, metrics, FastClock()) as observer:
                observer.on_status_written(admitted(job()), failed().status, now_s=NOW_S)
                await until(lambda: delivered() == 1)

    def delivered() -> float | None:
        return metrics.registry.get_sample_value("polyreme_alerts_total", {"result": "Delivered"})

    asyncio.run(asyncio.wait_for(story(), 30))
    ((payload, headers, _),) = receiver.got
    assert payload["runbook"] == "https://wiki.example#polyremejobfailed"
    assert "Polyreme-Signature" not in headers
    assert (
        metrics.registry.get_sample_value(
            "polyreme_jobs_ended_total", {"queue": "default", "result": "Failed", "reason": "RunFailed"}
        )
        == 1
    )


@pytest.mark.parametrize("url", ["http://hooks.example/T0", "https://", "ftp://hooks.example/T0", ""])
def test_an_address_without_https_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(url)
    with pytest.raises(InvalidConfigError, match="expected https") as refused:
        Webhook(folder=tmp_path, runbook_url="").read_url()
    assert "T0" not in str(refused.value)


def test_what_waits_is_bounded_and_tries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "QUEUE_MAX", 2)
    monkeypatch.setattr(alerts, "TRIES_MAX", 3)
    counted: list[str] = []

    async def refuse(alert: Alert) -> bool:
        del alert
        return False

    async def story() -> None:
        queue = AlertQueue(FastClock(), refuse, counted.append)
        for number in range(4):
            queue.on_job_observed(snapshot(dataclasses.replace(failed(), uid=f"u{number}")))
        assert counted == ["Dropped", "Dropped"]
        task = asyncio.ensure_future(queue.run())
        await until(lambda: counted.count("Dropped") == 4)
        # There is room again, so one that found none before is queued when it is seen again; one that was given up not.
        for number in (0, 3):
            queue.on_job_observed(snapshot(dataclasses.replace(failed(), uid=f"u{number}")))
        assert [alert.uid for alert in queue.waiting] == ["u3"]
        task.cancel()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert counted.count("Retried") == 6


def test_an_alert_that_the_receiver_refuses_holds_up_no_other() -> None:
    counted: list[str] = []

    async def story() -> None:
        async def deliver(alert: Alert) -> bool:
            return alert.uid != "u0"

        queue = AlertQueue(FastClock(), deliver, counted.append)
        for number in range(3):
            queue.on_job_observed(snapshot(dataclasses.replace(failed(), uid=f"u{number}")))
        task = asyncio.ensure_future(queue.run())
        await until(lambda: counted.count("Dropped") == 1)
        task.cancel()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert counted[:4] == ["Retried", "Delivered", "Delivered", "Retried"]


def kinds(view: JobView) -> list[tuple[AlertKind, str]]:
    return [(alert.kind, alert.occurrence) for alert in alerts_of_job(view, view.status)]


def test_what_alerts_and_what_tells_two_events_apart() -> None:
    running = admitted(job())
    assert kinds(running) == []
    stalled = StatusBuilder(running, NOW_S).set(ConditionType.RUNNING, False, Reason.STALLED, "rank 1 waits").build()
    view = dataclasses.replace(running, status=stalled)
    assert kinds(view) == [(AlertKind.JOB_HUNG, "1")]
    record = RestartRecord(attempt=1, at=rfc3339(NOW_S), cause="Hung", scope="RestartProcess")
    restarted = running.status.model_copy(update={"restart_records": [record]})
    hung = dataclasses.replace(running, status=restarted)
    assert [alert.id for alert in alerts_of_job(hung, restarted)] == [
        alert.id for alert in alerts_of_job(view, stalled)
    ]
    paused = StatusBuilder(running, NOW_S).set(ConditionType.SUSPENDED, True, Reason.LOSS_SPIKES).build()
    assert kinds(dataclasses.replace(running, status=paused)) == [(AlertKind.JOB_PAUSED_BY_LOSS, rfc3339(NOW_S))]
    suspended = StatusBuilder(running, NOW_S).set(ConditionType.SUSPENDED, True, Reason.SUSPENDED).build()
    assert kinds(dataclasses.replace(running, status=suspended)) == []


def test_a_node_alerts_once_for_each_time_that_it_is_out() -> None:
    node = HealthNode(name="n0", uid="u0")
    out = Record(state=NodeState.QUARANTINED, since_s=NOW_S, fault_class="gpu", reason="Xid79", evidence="fell off")
    first = alerts.alert_of_node(node, out)
    later = alerts.alert_of_node(node, out.but(state=NodeState.REPAIRING, since_s=NOW_S + 60))
    again = alerts.alert_of_node(node, out.but(repairs_s=(NOW_S + 120,), since_s=NOW_S + 500))
    assert first.id == later.id != again.id
    assert (first.reason, first.message) == ("gpu", "quarantined by the operator: Xid79: fell off")


def test_old_events_are_not_sent_again() -> None:
    queue = AlertQueue(FastClock(), lambda _: asyncio.sleep(0, result=True), lambda _: None)
    view = failed()
    condition = view.status.condition("Failed")
    assert condition is not None
    at = rfc3339(NOW_S - alerts.FRESH_S - 1)
    old = view.status.model_copy(update={"conditions": [condition.model_copy(update={"last_transition_time": at})]})
    queue.on_status_written(view, old, now_s=NOW_S)
    assert not queue.waiting
    queue.on_status_written(view, view.status, now_s=NOW_S)
    assert len(queue.waiting) == 1
