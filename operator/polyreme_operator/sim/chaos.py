"""What goes wrong outside the API: processes, nodes, the operator itself, and users who change their minds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from polyreme_operator.port import KINDS, ObjectRef, PortError
from polyreme_operator.sim.launcher import SimLauncher
from polyreme_operator.sim.world import World

EVENTS_MAX = 16
SIZES = (1, 2, 3, 4)


class Chaos:
    """Draws what goes wrong and when.

    Args:
        world: The cluster.
        rng: Every draw.
        reached: Counts what came about.
        enabled: Whether anything goes wrong at all.
    """

    def __init__(self, world: World, rng: random.Random, reached: Counter[tuple[str, str]], *, enabled: bool) -> None:
        self._world, self._rng, self._reached, self._enabled = world, rng, reached, enabled

    def begin(self, lasts_s: float, crash: Callable[[], None]) -> None:
        """Plan the trouble."""
        if not self._enabled:
            return
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
            ("operator crash", lambda: self._crash(crash)),
            ("suspend", self._suspend),
            ("scale", self._scale),
            ("job deleted", self._delete_job),
            ("history compacted", self._compact),
        )
        weights = (6, 3, 4, 4, 2, 2, 3, 2, 2, 4, 2, 2, 1, 2)
        for _ in range(self._rng.randrange(EVENTS_MAX)):
            name, act = self._rng.choices(acts, weights)[0]
            at_s = 2.0 + self._rng.random() * (lasts_s - 2.0)
            self._world.after(at_s, lambda name=name, act=act: self._do(name, act))  # type: ignore[misc]

    def end(self) -> None:
        """Peace: what is stopped goes on, what is away comes back, what is suspended is resumed."""
        world = self._world
        world.faulty = False
        for launcher in list(world.launchers.values()):
            if launcher.frozen:
                launcher.thaw()
            for rank in launcher.ranks.values():
                rank.stopped = False
        for name in world.nodes:
            world.node_back(name)
        for record in list(world.store.records("TrainingJob")):
            if record.manifest["spec"].get("suspend"):
                world.store.patch(ObjectRef.of(record.manifest), {"spec": {"suspend": False}})

    def _do(self, name: str, act: Callable[[], bool]) -> None:
        if self._world.faulty and act():
            self._reached[name, ""] += 1

    def _launcher(self) -> SimLauncher | None:
        alive = [launcher for launcher in self._world.launchers.values() if launcher.alive]
        return self._rng.choice(alive) if alive else None

    def _kill_rank(self) -> bool:
        return self._end_rank(code=None, signal=9)

    def _exit_rank(self) -> bool:
        return self._end_rank(code=self._rng.choice((1, 1, 7, 17)), signal=None)

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
        self._world.node_away(name, dead=dead)
        self._world.after(self._rng.choice((3.0, 15.0, 60.0)), lambda: self._world.node_back(name))
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

    def _patch_job(self, spec: dict[str, object]) -> bool:
        jobs = list(self._world.store.records("TrainingJob"))
        if not jobs:
            return False
        try:
            self._world.store.patch(ObjectRef.of(self._rng.choice(jobs).manifest), {"spec": spec})
        except PortError:
            return False
        return True

    @staticmethod
    def _crash(crash: Callable[[], None]) -> bool:
        crash()
        return True

    def _suspend(self) -> bool:
        jobs = list(self._world.store.records("TrainingJob"))
        if not jobs:
            return False
        ref = ObjectRef.of(self._rng.choice(jobs).manifest)
        self._world.store.patch(ref, {"spec": {"suspend": True}})
        self._world.after(self._rng.choice((0.5, 5.0, 40.0)), lambda: self._resume(ref))
        return True

    def _resume(self, ref: ObjectRef) -> None:
        try:
            self._world.store.patch(ref, {"spec": {"suspend": False}})
        except PortError:
            return

    def _scale(self) -> bool:
        return self._patch_job({"workers": {"replicas": self._rng.choice(SIZES)}})

    def _delete_job(self) -> bool:
        jobs = list(self._world.store.records("TrainingJob"))
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
