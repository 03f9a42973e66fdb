"""Shared parts of the tests of the launchers' machines: a leader, and its messages."""

from pathlib import Path
from typing import Any

from polyreme_api.environment import PodEnvironment
from polyreme_api.progress import ProgressRecord
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.follower import Tick
from polyreme_launcher.protocol.messages import Exited, Joined, Message, Release


def pod_environment(folder: Path, **other: Any) -> PodEnvironment:
    """What a pod tells its launcher: the first of two with one device each, and files in a folder."""
    (folder / "token").write_text("token")
    given = {
        "pod": "job-0",
        "job": "job",
        "namespace": "team",
        "job_uid": "u-1",
        "index": 0,
        "replacement": 0,
        "replicas": 2,
        "devices": 1,
        "leader_address": "job-0",
        "api_url": "https://10.0.0.1:6443",
        "token_file": str(folder / "token"),
        "secret_file": "",
        "pod_directory": str(folder),
        "checkpoint_url": (folder / "root").as_uri(),
    }
    return PodEnvironment(**{**given, **other})


def view(number: int = 1, *, replicas: int = 2, devices: int = 1, **fields: Any) -> l.AttemptView:
    defaults: dict[str, Any] = {
        "run": True,
        "checkpoint_requested": False,
        "replacements": {},
        "job_json": "{}",
        "plan_json": "{}",
    }
    return l.AttemptView(number=number, replicas=replicas, devices=devices, **{**defaults, **fields})


class Leader:
    """A leader whose effects are collected."""

    def __init__(self, *, replacement: int = 0) -> None:
        self.state = l.LeaderState(replacement=replacement)
        self.now_s = 0.0

    def feed(self, event: l.LeaderEvent) -> list[l.LeaderEffect]:
        self.state, effects = l.LeaderMachine.step(self.state, event, self.now_s)
        return list(effects)

    def say(self, index: int, message: Message, *, replacement: int = 0) -> list[l.LeaderEffect]:
        return self.feed(l.FromPeer(index=index, replacement=replacement, message=message))

    def joined(
        self, index: int, attempt: int, *, replacement: int = 0, launcher: str = "", forked: bool = False
    ) -> list[l.LeaderEffect]:
        message = Joined(
            attempt=attempt, index=index, replacement=replacement, launcher=launcher or f"of {index}", forked=forked
        )
        return self.say(index, message, replacement=replacement)

    def tick(self) -> list[l.LeaderEffect]:
        return self.feed(Tick())

    def connected(self, index: int, *, replacement: int = 0) -> list[l.LeaderEffect]:
        return self.feed(l.PeerConnected(index=index, replacement=replacement))

    def fixed(self, attempt: int, *, step: int = 0) -> list[l.LeaderEffect]:
        name = f"a{attempt - 1:06d}-s{step:08d}" if step else None
        return self.feed(
            l.ResumeFixed(attempt=attempt, resume_from=name, step=step, master_address="127.0.0.1", master_port=1)
        )

    def written(self) -> list[l.LeaderEffect]:
        """The Lease holds the newest record."""
        return self.feed(l.LeaseWritten(record=self.record))

    def released(self, attempt: int = 1, *, replicas: int = 2, **fields: Any) -> "Leader":
        """Bring an attempt past its barrier."""
        for index in range(replicas):
            self.connected(index)
        self.feed(l.JobChanged(attempt=view(attempt, replicas=replicas, **fields)))
        for index in range(replicas):
            self.joined(index, attempt)
        self.fixed(attempt)
        assert releases(self.written()) == [attempt]
        return self

    def exited(
        self, rank: int, *, attempt: int = 1, code: int | None = 0, number: int | None = None
    ) -> list[l.LeaderEffect]:
        return self.say(rank, Exited(attempt=attempt, rank=rank, code=code, signal=number))

    @property
    def record(self) -> ProgressRecord:
        assert self.state.record is not None
        return self.state.record


def releases(effects: list[l.LeaderEffect]) -> list[int]:
    messages = [effect.message for effect in effects if isinstance(effect, l.Broadcast | l.SendTo)]
    return [message.attempt for message in messages if isinstance(message, Release)]


def written(effects: list[l.LeaderEffect]) -> list[ProgressRecord]:
    return [effect.record for effect in effects if isinstance(effect, l.RenewLease)]
