"""Training of gangs, as far as the control plane sees it: steps, checkpoints, progress, exits."""

from __future__ import annotations

from collections.abc import Callable

from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import parse_checkpoint_name
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankPhase, StepRecord
from polyreme_launcher.protocol.messages import Release
from polyreme_simulator.kubelets import KubeletContext
from polyreme_simulator.launcher import SimLauncher
from polyreme_simulator.training import Gang, Root

BOOT_S = 1.0
STEP_S = 0.4
COMMIT_S = 0.3
LATE_PUT_S = 8.0
"""Longest time by which a checkpoint's marker lands late."""
POLL_S = 0.5


class GangTraining:
    """The gangs of all jobs.

    Args:
        world: The cluster.
    """

    def __init__(self, world: KubeletContext) -> None:
        self._world = world
        self.roots: dict[str, Root] = {}
        """Checkpoint roots by UID of the job."""
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.stopping: set[tuple[str, int]] = set()
        self.checkpoint_every: dict[str, int] = {}
        self.steps: dict[str, int] = {}

    def root(self, uid: str) -> Root:
        """Return a job's checkpoint root."""
        return self.roots.setdefault(uid, Root())

    def forked(self, launcher: SimLauncher, attempt: int, release: Release) -> None:
        """Ranks were forked: when all of them are there, they train."""
        uid = launcher.pod.job_uid
        self._world.facts.rules.gangs.forked(launcher, attempt, release, self._world)
        known = self._world.facts.attempts[uid, attempt]
        gang = self.gangs.get((uid, attempt))
        if gang is None:
            durable = None if release.resume_from is None else parse_checkpoint_name(release.resume_from)
            step = 0 if durable is None else durable.step
            gang = Gang(attempt=attempt, world=known.replicas * known.devices, resumed_from=step, step=step)
            gang.durable = durable
            self.gangs[uid, attempt] = gang
        gang.ranks.update(launcher.ranks)
        if len(gang.ranks) == gang.world:
            self._world.soon(BOOT_S, lambda: self._train(uid, gang))

    def _train(self, uid: str, gang: Gang) -> None:
        if not gang.whole:
            if gang.live and all(rank.alive for rank in gang.ranks.values()):
                self._world.after(POLL_S, lambda: self._train(uid, gang))
            return
        if self._world.time_s() < gang.busy_until_s:
            self._world.after(POLL_S, lambda: self._train(uid, gang))
            return
        stop = (uid, gang.attempt) in self.stopping
        if stop or gang.step >= self.steps[uid]:
            last_s = self._world.profile.final_save_s if stop else COMMIT_S
            end = ExitCode.STOPPED if stop else ExitCode.OK
            self._commit(uid, gang, gang.step, lambda: self._end(uid, gang, end), within_s=last_s)
            return
        gang.step += 1
        self.root(uid).steps.setdefault(gang.attempt, []).append(
            StepRecord(attempt=gang.attempt, step=gang.step, loss=1.0 / gang.step)
        )
        self._report(uid, gang, RankPhase.TRAINING)
        if gang.step % self.checkpoint_every[uid] == 0:
            self._commit(uid, gang, gang.step)
        self._world.after(STEP_S * (0.5 + self._world.rng.random()), lambda: self._train(uid, gang))

    def _commit(
        self,
        uid: str,
        gang: Gang,
        step: int,
        then: Callable[[], None] | None = None,
        *,
        within_s: float = COMMIT_S,
    ) -> None:
        """Commit a checkpoint a little later; a stopped rank 0 commits when it continues, however late."""
        rank, reference = gang.ranks[0], CheckpointRef(attempt=gang.attempt, step=step)

        def write() -> None:
            if rank.stopped:
                self._world.after(POLL_S, write)
            elif rank.alive:
                late = self._world.faulty and self._world.rng.random() < self._world.profile.late_puts
                self._world.after(LATE_PUT_S * self._world.rng.random() if late else 0.0, land)

        def land() -> None:
            if step > gang.resumed_from:
                self.root(uid).commit(reference)
            tell()

        def tell() -> None:
            if rank.stopped:
                self._world.after(POLL_S, tell)
            elif rank.alive:
                if step > gang.resumed_from and (gang.durable is None or gang.durable.step < step):
                    gang.durable = reference
                self._report(uid, gang, RankPhase.TRAINING)
                if then is not None:
                    then()

        self._world.soon(within_s, write)

    def _end(self, uid: str, gang: Gang, code: int) -> None:
        if not gang.whole:
            if all(rank.alive for rank in gang.ranks.values()):
                self._world.after(POLL_S, lambda: self._end(uid, gang, code))
            return
        if code == ExitCode.OK:
            self._report(uid, gang, RankPhase.DONE)
        for rank in gang.ranks.values():
            self._world.soon(COMMIT_S, lambda rank=rank: rank.end(code=code))  # type: ignore[misc]

    def _report(self, uid: str, gang: Gang, phase: RankPhase) -> None:
        if gang.done:
            return
        gang.done = phase is RankPhase.DONE
        record = ProgressRecord(
            attempt=gang.attempt,
            phase=phase,
            step=gang.step,
            steps=self.steps[uid],
            step_seconds=STEP_S,
            checkpoint=gang.durable,
            outcome=Outcome.SUCCEEDED if phase is RankPhase.DONE else None,
        )
        for launcher in self._world.launchers.values():
            if launcher.alive and launcher.leading is not None and launcher.ranks.get(0) is gang.ranks[0]:
                launcher.leading.report(record)

    def signal(self, uid: str, attempt: int, *, stop: bool) -> None:
        """Ranks were asked to checkpoint, and to stop if ``stop``."""
        gang = self.gangs.get((uid, attempt))
        if gang is not None and stop:
            self.stopping.add((uid, attempt))
