"""What ``kubectl polyreme logs`` shows: from pods, from the checkpoint root, and a sentence where there is nothing."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polyreme.plugin.log_follow import Follower
from polyreme.plugin.log_view import Workers, show, wanted
from polyreme.plugin.logs import Position, Selection, index_of_rank
from polyreme.plugin.main import invoke
from polyreme.run_files import stored_logs
from polyreme_api import labels
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotFoundError, PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.rank_logs import RankAttempt
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.types.views import JobView
from tests.unit.plugin import plugin_scenes as scenes
from tests.unit.plugin.plugin_scenes import NOW_S, condition, job, runs, snapshot


def view(**fields: Any) -> JobView:
    return snapshot(job("big", **fields)).jobs[0]


def running(attempt: int = 2, **status: Any) -> Manifest:
    found = runs("n0", "n1", devices=2, **status)
    found["attempt"]["number"] = attempt
    return found


@dataclasses.dataclass
class LogServer:
    """The API server's endpoint of logs: lines by pod, each with its time, as containers write them."""

    lines: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    ended: set[str] = dataclasses.field(default_factory=set)
    asked: list[dict[str, str]] = dataclasses.field(default_factory=list)
    breaks: int = 0
    """Followed connections that break after their next line."""
    url: str = ""

    def write(self, pod: str, *lines: str, second: int = 0) -> None:
        known = self.lines.setdefault(pod, [])
        for line in lines:
            known.append((f"2026-11-26T10:00:{second:02}.{100 + len(known):09}+02:00", line))

    @property
    def connection(self) -> Connection:
        return Connection(url=self.url, tls=None, authorization=lambda: None)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["LogServer"]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/team/pods/{pod}/log", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query, pod = dict(request.query), request.match_info["pod"]
        self.asked.append(query)
        if pod not in self.lines:
            return web.json_response({"reason": "BadRequest", "message": "ContainerCreating"}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        sent = len(self.lines[pod]) - int(query["tailLines"]) if "tailLines" in query else 0
        # A whole second, as the API server passes it on to a kubelet.
        since = query.get("sinceTime", "").partition(".")[0]
        while True:
            for stamp, line in self.lines[pod][max(0, sent) :]:
                if stamp >= since:
                    await response.write(f"{stamp} {line}\n".encode())
                    if "true" in query["follow"] and self.breaks:
                        self.breaks -= 1
                        assert request.transport is not None
                        request.transport.abort()
                        return response
            sent = len(self.lines[pod])
            if "false" in query["follow"] or pod in self.ended:
                return response
            await asyncio.sleep(0.005)


def shown(server: LogServer, of: JobView, pods: list[Manifest], **asked: Any) -> list[str]:
    """What is printed."""
    taken: list[str] = []

    async def story() -> None:
        async with server.serving():
            chosen = wanted(of, **{"rank": None, "index": None, "attempt": None, "tail": None} | asked)
            await show(server.connection, chosen, Workers(chosen, pods), taken.append)

    asyncio.run(story())
    return taken


def gone(of: JobView, **asked: Any) -> list[str]:
    return shown(LogServer(), of, [], **asked)


NAMES = [labels.pod_name("big", "uid-big", index=index, replacement=0) for index in range(2)]


def two_pods() -> tuple[LogServer, list[Manifest]]:
    server = LogServer()
    for index, name in enumerate(NAMES):
        for attempt in (1, 2):
            server.write(name, f"launcher begins attempt {attempt}")
            for rank in (2 * index, 2 * index + 1):
                server.write(name, *(f"[rank {rank} attempt {attempt}] line {number}" for number in range(3)))
    return server, [scenes.pod("big", index, f"n{index}") for index in range(2)]


def store(root: Path, *logs: tuple[int, int]) -> str:
    for attempt, rank in logs:
        path = root / RankAttempt(attempt, rank).stored_key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"first of {rank} in {attempt}\nlast of {rank} in {attempt}\n")
    return root.as_uri()


def test_all_workers_are_shown_one_after_the_other_and_launchers_lines_name_their_worker() -> None:
    server, pods = two_pods()
    lines = shown(server, view(status=running()), pods, tail=3)
    assert lines == [f"[rank {rank} attempt 2] line {number}" for rank in (1, 3) for number in range(3)]
    assert {query["tailLines"] for query in server.asked} == {"3"}
    lines = shown(server, view(status=running()), pods)
    assert lines[0] == "[worker 0] launcher begins attempt 1"
    assert shown(server, view(status=running()), pods, index=1)[0] == "launcher begins attempt 1"


def test_a_rank_an_attempt_or_both_are_chosen_and_tail_counts_lines_of_the_rank() -> None:
    server, pods = two_pods()
    job_ = view(status=running())
    lines = shown(server, job_, pods, rank=3, tail=2)
    assert lines == ["[rank 3 attempt 2] line 1", "[rank 3 attempt 2] line 2"]
    assert shown(server, job_, pods, rank=3, attempt=1) == [f"[rank 3 attempt 1] line {number}" for number in range(3)]
    assert len(shown(server, job_, pods, attempt=1)) == 4 * 3
    assert not any("launcher" in line for line in shown(server, job_, pods, attempt=1))
    assert Selection().takes("whatever")
    assert not Selection(rank=3).takes("[rank 33 attempt 1] x")


def test_what_pods_do_not_have_comes_from_the_checkpoint_root(tmp_path: Path) -> None:
    """A worker's pod was replaced after attempt 1; the other one has its lines still."""
    root = store(tmp_path, *((1, rank) for rank in range(4)))
    server, pods = two_pods()
    server.lines[NAMES[1]] = [line for line in server.lines[NAMES[1]] if "attempt 1" not in line[1]]
    of = view(status=running(checkpointLocation=root))
    lines = shown(server, of, pods, attempt=1)
    assert lines[:6] == [f"[rank {rank} attempt 1] line {number}" for rank in (0, 1) for number in range(3)]
    assert lines[6:] == [
        f"[rank {rank} attempt 1] {word} of {rank} in 1" for rank in (2, 3) for word in ("first", "last")
    ]
    assert shown(server, of, pods, attempt=1, rank=3, tail=1) == ["[rank 3 attempt 1] last of 3 in 1"]


def test_where_pods_are_gone_the_newest_stored_attempt_is_shown_whatever_names_the_root(tmp_path: Path) -> None:
    root = store(tmp_path, (1, 0), (2, 0), (2, 1), (10, 1))
    failed = {**running(12), "conditions": [condition("Failed", "RunFailed")]}
    for of in (
        view(status={**failed, "checkpointLocation": root}),
        view(status=failed, checkpoint={"location": root}),
    ):
        assert gone(of, tail=1) == ["[rank 1 attempt 10] last of 1 in 10"]
        assert gone(of, rank=0) == ["[rank 0 attempt 2] first of 0 in 2", "[rank 0 attempt 2] last of 0 in 2"]
        assert gone(of, attempt=2, tail=1) == [f"[rank {rank} attempt 2] last of {rank} in 2" for rank in range(2)]
    assert invoke(["logs", "big", "--root", root, "--rank", "0", "--attempt", "1"]) == 0


def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setattr(stored_logs, "PATIENCE", dataclasses.replace(stored_logs.PATIENCE, tries_s=0, retries_s=0))
    return "s3://bucket/team/big"


@pytest.mark.parametrize(
    ("status", "asked", "error", "words"),
    [
        (running(), {"rank": 4}, InvalidConfigError, "no rank 4 in team/big, expected 0 to 3"),
        (running(), {"index": 2}, InvalidConfigError, "no worker 2 in team/big, expected 0 to 1"),
        (running(), {"attempt": 3}, NotFoundError, "no attempt 3 of team/big: its newest is 2"),
        ({}, {"attempt": 1}, NotFoundError, "no attempt 1 of team/big: it has none yet"),
        (
            {"conditions": [condition("Queued", "ExceedsQuota", "needs 8 devices")]},
            {},
            NotFoundError,
            "team/big has had no attempt, so no rank has written anything: Queued: needs 8 devices",
        ),
        (running(), {"rank": 1}, NotFoundError, "its pods are gone, and its checkpoint root is not on record"),
        (
            running(checkpointLocation="file:///no/such/folder"),
            {"rank": 1, "attempt": 2},
            NotFoundError,
            "stored lines are in file:///no/such/folder/logs/a000002/rank-00001.log on the volume that",
        ),
        (
            running(checkpointLocation="EMPTY"),
            {},
            NotFoundError,
            "its pods are gone, and nothing is stored under EMPTY/logs/; of a pod that was killed at once, or with its",
        ),
        (
            running(checkpointLocation="ONE"),
            {"rank": 1, "attempt": 2},
            NotFoundError,
            "no lines of team/big, rank 1, attempt 2 are stored under ONE/logs/: there are attempts 1",
        ),
        (
            running(checkpointLocation="ONE"),
            {"rank": 3, "attempt": 1},
            NotFoundError,
            "no lines of team/big, rank 3, attempt 1 are stored under ONE/logs/: there are ranks 0",
        ),
        (
            running(checkpointLocation="BUCKET"),
            {"rank": 1, "attempt": 2},
            EnvironmentFailedError,
            "stored lines are in BUCKET/logs/a000002/rank-00001.log and can't be read from here: object store",
        ),
        (
            running(checkpointLocation="BUCKET"),
            {},
            EnvironmentFailedError,
            "; with access to the bucket: aws s3 cp --recursive BUCKET/logs/ .",
        ),
    ],
)
def test_where_there_is_nothing_a_sentence_says_why_or_where_it_is_and_the_exit_code_is_not_0(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: Manifest,
    asked: dict[str, int],
    error: type[PolyremeError],
    words: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "EMPTY": (tmp_path / "empty").as_uri(),
        "ONE": store(tmp_path / "one", (1, 0)),
        "BUCKET": bucket(monkeypatch),
    }
    name = status.get("checkpointLocation", "")
    if name in places:
        status = {**status, "checkpointLocation": places[name]}
        words = words.replace(name, places[name])
    with pytest.raises(error) as raised:
        gone(view(status=status), **asked)
    assert words in str(raised.value)
    assert raised.value.exit_code in {ExitCode.USAGE, ExitCode.NOT_FOUND, ExitCode.ENVIRONMENT}


def test_a_pod_without_lines_of_the_rank_is_no_empty_output() -> None:
    """A launcher of an older release prints none."""
    server = LogServer()
    server.write(NAMES[0], "rank 0 of attempt 1 ended: code 1")
    pods = [scenes.pod("big", 0, "n0")]
    with pytest.raises(NotFoundError, match="no lines of rank 0 of team/big: the log of its pod has none"):
        shown(server, view(status=running()), pods, rank=0)
    with pytest.raises(PolyremeError, match="ContainerCreating"):
        shown(LogServer(), view(status=running()), pods, rank=0)


def test_containers_that_bring_their_own_training_show_all_lines_of_the_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = LogServer()
    server.write(NAMES[1], "epoch 1")
    own = {"replicas": 2, "devices": 2, "deviceResource": scenes.GPU, "runtime": {"mode": "Environment"}}
    of = view(status=running(), workers=own)
    pods = [scenes.pod("big", index, f"n{index}") for index in range(2)]
    assert shown(server, of, pods, rank=3) == ["epoch 1"]
    assert "bring their own training: all lines of worker 1 are shown" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match="nothing is stored of them"):
        shown(server, of, pods, attempt=1)


def test_a_rank_is_found_through_the_devices_of_the_attempt() -> None:
    of = view(status=runs("n0", "n1", devices=4))
    assert [index_of_rank(of, rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_a_log_is_continued_with_its_next_line_though_lines_have_the_same_time() -> None:
    position = Position()
    times = ["10:00:00Z", "10:00:00.5Z", "10:00:00.5Z", "10:00:00.500000001Z", "12:00:01+02:00", "10:00:01Z"]
    lines = [f"2026-11-26T{time} {number}" for number, time in enumerate(times)]
    assert [position.take(line) for line in lines[:3]] == ["0", "1", "2"]
    for known in range(3, len(lines)):
        position.reconnected()
        assert [position.take(line) for line in lines[: known + 1]] == [None] * known + [str(known)]
    assert position.take("unable to retrieve container logs") == "unable to retrieve container logs"


class World:
    """A job of two workers, as a follower sees it: an embedded cluster and the endpoint of logs."""

    def __init__(self, server: LogServer) -> None:
        self.server = server
        self.cluster = EmbeddedCluster(Store(new_uid=iter(f"uid-{n}" for n in range(99)).__next__, now_s=lambda: NOW_S))
        self.taken: list[str] = []

    async def begin(self) -> JobView:
        manifest = job("big", status=running())
        self.status = manifest.pop("status")
        manifest["metadata"] = {"name": "big", "namespace": "team"}
        made = await self.cluster.create(manifest)
        self.uid = made["metadata"]["uid"]
        await self.say()
        from polyreme_operator.types.parse import parse_job_view

        return parse_job_view(await self.cluster.get(ObjectRef.of(made)))

    async def say(self, **status: Any) -> None:
        self.status |= status
        ref = ObjectRef(kind="TrainingJob", namespace="team", name="big")
        await self.cluster.patch(ref, {"status": self.status}, subresource="status")

    async def pod(self, index: int, replacement: int = 0, phase: str = "Running") -> str:
        manifest = scenes.pod("big", index, f"n{index}")
        name = labels.pod_name("big", self.uid, index=index, replacement=replacement)
        manifest["metadata"] = {
            "name": name,
            "namespace": "team",
            "labels": {
                **manifest["metadata"]["labels"],
                labels.LABEL_JOB_UID: self.uid,
                labels.LABEL_REPLACEMENT: str(replacement),
            },
            "ownerReferences": [{**manifest["metadata"]["ownerReferences"][0], "uid": self.uid}],
        }
        status = manifest.pop("status") | {"phase": phase}
        made = await self.cluster.create({"apiVersion": "v1", "kind": "Pod", **manifest})
        await self.phase(name, status["phase"])
        return str(made["metadata"]["name"])

    async def phase(self, name: str, phase: str) -> None:
        ref = ObjectRef(kind="Pod", namespace="team", name=name)
        await self.cluster.patch(ref, {"status": {"phase": phase}}, subresource="status")

    async def remove(self, name: str) -> None:
        ref = ObjectRef(kind="Pod", namespace="team", name=name)
        found = await self.cluster.get(ref)
        await self.cluster.delete(ref, uid=found["metadata"]["uid"], grace_period_s=0)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)

    def following(self, of: JobView, **asked: Any) -> "asyncio.Task[None]":
        chosen = wanted(of, **{"rank": None, "index": None, "attempt": None, "tail": None} | asked)
        follower = Follower(
            self.cluster, self.server.connection, chosen, self.taken.append, sleep=lambda _: asyncio.sleep(0.01)
        )
        return asyncio.create_task(follower.run())


async def test_all_ranks_are_followed_over_broken_connections_and_replaced_pods_until_the_job_has_ended() -> None:
    async with LogServer().serving() as server:
        world = World(server)
        of = await world.begin()
        first, second = await world.pod(0), await world.pod(1)
        server.write(first, *(f"[rank 0 attempt 2] old {number}" for number in range(9)))
        server.write(second, "[rank 2 attempt 2] a")
        server.breaks = 4
        task = world.following(of, tail=5)
        await world.until(lambda: len(world.taken) == 6)
        server.write(first, *(f"[rank 1 attempt 2] new {number}" for number in range(5)))
        await world.until(lambda: len(world.taken) == 11)
        server.ended.add(second)
        await world.remove(second)
        third = await world.pod(1, replacement=1, phase="Pending")
        await world.say(attempt={**world.status["attempt"], "number": 3})
        server.write(third, "launcher", *(f"[rank 3 attempt 3] again {number}" for number in range(60)))
        await world.phase(third, "Running")
        await world.until(lambda: len(world.taken) == 11 + 61)
        server.write(first, "[rank 0 attempt 3] the last")
        server.ended |= {first, third}
        await world.phase(first, "Succeeded")
        await world.phase(third, "Succeeded")
        await world.say(conditions=[condition("Succeeded", "Completed")])
        async with asyncio.timeout(20):
            await task
        # Each line once, those of one pod in order.
        expected = [f"[rank 0 attempt 2] old {number}" for number in range(4, 9)]
        expected += [f"[rank 1 attempt 2] new {number}" for number in range(5)] + ["[rank 0 attempt 3] the last"]
        assert [line for line in world.taken if "rank 0" in line or "rank 1" in line] == expected
        rest = ["[rank 2 attempt 2] a", "[worker 1] launcher"]
        rest += [f"[rank 3 attempt 3] again {number}" for number in range(60)]
        assert [line for line in world.taken if line not in expected] == rest


async def test_an_attempt_is_followed_until_another_one_has_followed_it() -> None:
    async with LogServer().serving() as server:
        world = World(server)
        of = await world.begin()
        pod = await world.pod(0)
        server.write(pod, *(f"[rank {number % 2} attempt 2] {number}" for number in range(20)))
        task = world.following(of, rank=1, attempt=2, tail=3)
        await world.until(lambda: len(world.taken) == 3)
        server.write(pod, "[rank 1 attempt 2] ends", "[rank 1 attempt 3] begins", second=1)
        await world.say(attempt={**world.status["attempt"], "number": 3})
        async with asyncio.timeout(20):
            await task
        assert world.taken == [f"[rank 1 attempt 2] {number}" for number in (15, 17, 19, "ends")]


async def test_following_a_job_that_is_deleted_ends() -> None:
    async with LogServer().serving() as server:
        world = World(server)
        of = await world.begin()
        task = world.following(of)
        await asyncio.sleep(0.05)
        ref = ObjectRef(kind="TrainingJob", namespace="team", name="big")
        await world.cluster.delete(ref, uid=world.uid)
        async with asyncio.timeout(20):
            await task
        assert world.taken == []
