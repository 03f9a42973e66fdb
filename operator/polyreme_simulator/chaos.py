"""Faults outside the API: processes, nodes, the operator's replicas, and users who change their minds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.port import KINDS, ObjectRef, PortError
from polyreme_local.api_server.record import Record
from polyreme_simulator.changes import Changes
from polyreme_simulator.launcher import SimLauncher
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.replicas import Replica
from polyreme_simulator.world import World

EVENTS_MAX = 18
CHANGES_SHARE = 0.3
"""Share of what happens that changes the cluster instead of breaking something."""
STOPPED_S = (3.0, 12.0, 30.0)
PAUSES_S = (6.0, 12.0, 20.0)
SIZES = (1, 2, 3, 4)
RANK_EXITS = (ExitCode.INTERNAL, ExitCode.INTERNAL, ExitCode.ENVIRONMENT, ExitCode.FENCED)


class Chaos:
    """Draws what goes wrong and when.

    Args:
        world: The cluster.
        changes: What people change meanwhile.
        replicas: Of the operator.
        rng: Every draw.
        reached: Counts what came about.
    """

    def __init__(
        self,
        world: World,
        changes: Changes,
        replicas: Sequence[Replica],
        rng: random.Random,
        reached: Counter[tuple[str, str]],
    ) -> None:
        self._world, self._changes, self._replicas = world, changes, replicas
        self._rng, self._reached, self._profile = rng, reached, world.profile

    def begin(self, lasts_s: float) -> None:
        """Schedule the faults."""
        acts: tuple[tuple[str, Callable[[], bool]], ...] = (
            ("rank killed", self._kill_rank),
            ("rank exits", self._exit_rank),
            ("launcher killed", self._kill_launcher),
            ("pod deleted", self._delete_pod),
            ("node dies", lambda: self._node(dead=True)),
            ("node cut off", lambda: self._node(dead=False)),
            ("launcher stopped", self._freeze),
            ("rank stopped", self._stop_rank),
            ("rank hangs", lambda: self._stop_rank(for_good=True)),
            ("gang pauses", self._pause_gang),
            ("replica crashes", self._crash),
            ("both replicas crash", self._crash_all),
            ("replica stopped by hand", self._stop_replica),
            ("replica replaced", self._replace),
            ("suspend", self._suspend),
            ("scale", self._scale),
            ("job deleted", self._delete_job),
            ("history compacted", self._compact),
        )
        weights = (6, 3, 4, 4, 2, 2, 3, 2, 2, 2, 3, 1, 2, 1, 2, 2, 1, 2)
        names = [name for name, _ in acts]
        favours = self._profile.favours
        weighed = [favours.get(name, weight) for name, weight in zip(names, weights, strict=True)]
        for _ in range(self._rng.randrange(self._profile.events_min, EVENTS_MAX)):
            changes = self._rng.random() < CHANGES_SHARE
            name, act = self._changes.draw() if changes else self._rng.choices(acts, weighed)[0]
            at_s = 2.0 + self._rng.random() * (lasts_s - 2.0)
            self._world.after(at_s, lambda name=name, act=act: self._do(name, act))  # type: ignore[misc]

    def end(self) -> None:
        """End the faults: stopped processes continue, nodes come back, suspended jobs are resumed."""
        world = self._world
        world.faulty, world.calm_since_s = False, world.time_s()
        for replica in self._replicas:
            replica.thaw()
        for launcher in list(world.launchers.values()):
            if launcher.frozen:
                launcher.thaw()
            for rank in launcher.ranks.values():
                rank.stopped = False
        for name in world.nodes:
            world.machines.back(name)
        self._changes.repair()
        for record in self._jobs():
            if record.manifest["spec"].get("suspend"):
                world.store.change(ObjectRef.of(record.manifest), {"spec": {"suspend": False}})

    def _do(self, name: str, act: Callable[[], bool]) -> None:
        if self._world.faulty and act():
            self._reached[name, ""] += 1

    def _jobs(self) -> list[Record]:
        return [record for record in self._world.store.records("TrainingJob") if not is_set_apart(record.manifest)]

    def _launcher(self) -> SimLauncher | None:
        alive = [launcher for launcher in self._world.launchers.values() if launcher.alive]
        return self._rng.choice(alive) if alive else None

    def _kill_rank(self) -> bool:
        return self._end_rank(code=None, signal=9)

    def _exit_rank(self) -> bool:
        return self._end_rank(code=self._rng.choice(RANK_EXITS), signal=None)

    def _end_rank(self, *, code: int | None, signal: int | None) -> bool:
        alive = [rank for launcher in self._world.launchers.values() for rank in launcher.ranks.values() if rank.alive]
        if not alive:
            return False
        self._rng.choice(alive).end(code=code, signal=signal)
        return True

    def _kill_launcher(self) -> bool:
        launcher = self._launcher()
        if launcher is not None:
            launcher.kill()
        return launcher is not None

    def _delete_pod(self) -> bool:
        pods = list(self._world.store.records("Pod"))
        if not pods:
            return False
        pod = self._rng.choice(pods).manifest
        self._world.store.delete(ObjectRef.of(pod), uid=pod["metadata"]["uid"])
        return True

    def _node(self, *, dead: bool) -> bool:
        name = self._rng.choice(sorted(self._world.nodes))
        self._world.machines.away(name, dead=dead)
        self._world.after(self._rng.choice((3.0, 15.0, 60.0)), lambda: self._world.machines.back(name))
        return True

    def _freeze(self) -> bool:
        launcher = self._launcher()
        if launcher is None or launcher.frozen:
            return False
        launcher.freeze()
        self._world.after(self._rng.choice((2.0, 12.0, 30.0)), launcher.thaw)
        return True

    def _stop_rank(self, *, for_good: bool = False) -> bool:
        alive = [rank for launcher in self._world.launchers.values() for rank in launcher.ranks.values() if rank.alive]
        if not alive:
            return False
        rank = self._rng.choice(alive)
        rank.stop()
        if not for_good:
            self._world.after(self._rng.choice((2.0, 12.0)), lambda: setattr(rank, "stopped", False))
        return True

    def _pause_gang(self) -> bool:
        """A gang makes no step for longer than a stall takes: it evaluates, say. No rank of it idles."""
        whole = [gang for gang in self._world.gangs.values() if gang.whole and not gang.done]
        if not whole:
            return False
        self._rng.choice(whole).busy_until_s = self._world.time_s() + self._rng.choice(PAUSES_S)
        return True

    def _patch_job(self, spec: dict[str, object]) -> bool:
        jobs = self._jobs()
        if not jobs:
            return False
        try:
            self._world.store.change(ObjectRef.of(self._rng.choice(jobs).manifest), {"spec": spec})
        except PortError:
            return False
        return True

    def _crash(self) -> bool:
        self._rng.choice(self._replicas).crash()
        return True

    def _crash_all(self) -> bool:
        for replica in self._replicas:
            replica.crash()
        return True

    def _stop_replica(self) -> bool:
        self._rng.choice(self._replicas).stop(self._rng.choice(STOPPED_S))
        return True

    def _replace(self) -> bool:
        self._rng.choice(self._replicas).leave()
        return True

    def _suspend(self) -> bool:
        jobs = self._jobs()
        if not jobs:
            return False
        ref = ObjectRef.of(self._rng.choice(jobs).manifest)
        self._world.store.change(ref, {"spec": {"suspend": True}})
        self._world.after(self._rng.choice((0.5, 5.0, 40.0)), lambda: self._resume(ref))
        return True

    def _resume(self, ref: ObjectRef) -> None:
        try:
            self._world.store.change(ref, {"spec": {"suspend": False}})
        except PortError:
            return

    def _scale(self) -> bool:
        return self._patch_job({"workers": {"replicas": self._rng.choice(SIZES)}})

    def _delete_job(self) -> bool:
        jobs = self._jobs()
        if not jobs:
            return False
        job = self._rng.choice(jobs).manifest
        self._world.store.delete(ObjectRef.of(job), uid=job["metadata"]["uid"])
        return True

    def _compact(self) -> bool:
        for kind in KINDS:
            self._world.store.history(kind).forget(self._world.store.version)
        self._world.store.expire_continue_tokens()
        return True
