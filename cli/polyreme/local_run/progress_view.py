"""Progress of a run for its user, and the records for those who look later.

Read from the store, ten times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from polyreme.local_run.cluster import LocalCluster
from polyreme.report.run_report import verdict
from polyreme.run_files.data import steps_of, steps_words
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import checkpoint_url, read_start
from polyreme.run_files.timeline import Moment, Timeline
from polyreme.views.formatting import duration
from polyreme.views.live_table import LiveView, RunView, StageView
from polyreme_api.clock import Clock
from polyreme_api.job import TrainingJob
from polyreme_api.job.accounting import goodput_of
from polyreme_api.progress import ProgressRecord, RankPhase, name_stopped
from polyreme_operator.types.views import is_paused
from polyreme_system.files import write_json

LOOK_EVERY_S = 0.1
STATE_EVERY_S = 1.0
EVENTS_SHOWN_MAX = 5
MEASURES_SHOWN = 2
"""Numbers of the objective."""
STILL_S = 20
"""Time without a new step after which the sentence says so."""
STILL_STEPS = 20
"""The same, in steps of the pace so far; the longer time counts."""
STILL_ROUND_S = 10
HALT_S = 5.0
"""Time without a new step after which no time to go is shown."""
HALT_STEPS = 5
"""The same, in steps of the pace so far; the longer time counts."""
_NAMED_STATES = {"Succeeded", "Failed", "Restarting", "Waiting"}
"""Words that a sentence alone does not say."""


class Watcher:
    """Follows one job in the embedded store."""

    def __init__(
        self, run: RunDirectory, job: TrainingJob, cluster: LocalCluster, timeline: Timeline, clock: Clock
    ) -> None:
        self._run = run
        self._job = job
        self._cluster = cluster
        self._timeline = timeline
        self._clock = clock
        self._view = LiveView()
        self._view.__enter__()
        self._shown: RunView | None = None
        self._stages: dict[str, StageView] = {}
        self._said: list[str] = []
        self._state_at_s = 0.0
        self._moved = (0, 0, 0.0)
        """Attempt and step that were seen last, and since when [s, steady]."""
        self._begun = False
        """Whether the beginning of the run was reported."""
        self._looking = asyncio.Lock()
        self.attempt = 0
        """Number of the current attempt, 0 before the first."""

    async def until_finished(self) -> None:
        """Follow the job until a terminal condition holds, or it is paused and has stopped."""
        while not (job := await self._look()).status.finished:
            if is_paused(job.status, job.metadata.generation) and not await self._cluster.pods():
                self.stopped()
                return
            await self._clock.sleep(LOOK_EVERY_S)

    async def until_suspended(self) -> None:
        """Follow the job until it has stopped, or has finished on the way."""
        while True:
            status = (await self._look()).status
            if status.finished or (status.is_true("Suspended") and not await self._cluster.pods()):
                return
            await self._clock.sleep(LOOK_EVERY_S)

    def data_progress(self, line: Mapping[str, Any]) -> None:
        """Take a progress line of the data pipeline."""
        if "stage" in line:
            stage = StageView(name=line["stage"], done=line["done"], total=line["total"])
            self._stages[stage.name] = stage

    def say(self, words: str) -> None:
        """Show a sentence among the events."""
        self._said = [*self._said, words][-EVENTS_SHOWN_MAX:]

    def stopped(self) -> None:
        """Remember when the run had stopped on request: what follows is not its time."""
        self._timeline.add(Moment(at_s=self._clock.now_s(), kind="stopped", attempt=self.attempt))

    def close(self) -> None:
        """Leave the last state, and the messages since, on the screen."""
        # A terminal that was closed takes nothing any more.
        with contextlib.suppress(OSError):
            if self._shown is not None:
                self._view.show(
                    dataclasses.replace(self._shown, events=tuple(self._said)), now_s=self._clock.steady_s()
                )
            self._view.__exit__(None, None, None)

    async def _look(self) -> TrainingJob:
        async with self._looking:
            job = await self._cluster.job()
            progress = await self._cluster.progress()
            self._note_moments(job, progress)
            ready, total = await self._cluster.pods_ready(job)
            view = self._run_view(job, progress, ready=ready, total=total)
            self._shown = view
            with contextlib.suppress(OSError):
                self._view.show(view, now_s=self._clock.steady_s())
            if self._clock.steady_s() - self._state_at_s >= STATE_EVERY_S:
                self._state_at_s = self._clock.steady_s()
                self.write_state(self._run, _row(job, progress, view, self._stages), job)
            return job

    def _note_moments(self, job: TrainingJob, progress: ProgressRecord | None) -> None:
        now_s, attempt = self._clock.now_s(), job.status.attempt
        if attempt is not None:
            if attempt.number > self.attempt:
                failed = [record for record in job.status.restart_records if record.attempt == self.attempt]
                if failed:
                    self.say(f"attempt {attempt.number} begins: {failed[-1].message}")
                self.attempt = attempt.number
                self._timeline.add(Moment(at_s=now_s, kind="attempt", attempt=attempt.number, text=attempt.scope))
            if progress is not None and progress.attempt == attempt.number and progress.released:
                if progress.step > (progress.resumed_from_step or 0) and not self._begun:
                    self._begun = True
                    self._say_beginning(job)
                self._timeline.add(Moment(at_s=now_s, kind="released", attempt=attempt.number))
            if job.status.finished:
                self._timeline.add(Moment(at_s=now_s, kind="finished", attempt=attempt.number, text=verdict(job)[0]))

    def _say_beginning(self, job: TrainingJob) -> None:
        """Say what follows from the data, and from the checkpoint that the job starts from."""
        if job.spec.training.epochs is not None:
            self.say(steps_words(self._run, job.spec))
        if job.spec.start_from is not None and (words := read_start(checkpoint_url(self._run, job))):
            self.say(words)

    def _run_view(self, job: TrainingJob, progress: ProgressRecord | None, *, ready: int, total: int) -> RunView:
        current = progress if progress is not None and progress.attempt == self.attempt and not _idle(job) else None
        steps = (current.steps if current else 0) or steps_of(self._run, job.spec)
        step = _step(job, current)
        pace_s = current.step_seconds if current else None
        return RunView(
            job=job.metadata.name,
            sentence=_checks(current) or _sentence(job) + self._stillness(current, pace_s),
            phase=current.phase.value if current else "",
            attempt=self.attempt,
            step=step,
            steps=steps,
            training_stage=current.stage if current else "",
            loss=current.loss if current else None,
            held_out_loss=current.held_out_loss if current else None,
            objective=dict(itertools.islice(current.objective.items(), MEASURES_SHOWN)) if current else {},
            tokens_per_second=current.tokens_per_second if current else None,
            # At the end it is printed below, and the screen shows it once.
            goodput=None if job.status.finished else goodput_of(job.status.accounting.table),
            left_s=(steps - step) * pace_s if pace_s and step < steps and not self._halts(current, pace_s) else None,
            ready=ready,
            replicas=0 if job.status.finished else total,
            checkpoint_step=current.checkpoint.step if current and current.checkpoint else None,
            stages=tuple(self._stages.values()),
            events=tuple(self._said),
        )

    def _stillness(self, progress: ProgressRecord | None, pace_s: float | None) -> str:
        """Say for how long no step has come, when that is long for ranks that train."""
        now_s, step = self._clock.steady_s(), progress.step if progress else 0
        if self._moved[:2] != (self.attempt, step):
            self._moved = (self.attempt, step, now_s)
        still_s = int(now_s - self._moved[2]) // STILL_ROUND_S * STILL_ROUND_S
        training = progress is not None and progress.phase is RankPhase.TRAINING
        if training and progress is not None and progress.stopped:
            return f"; {name_stopped(progress.stopped, devices=self._job.spec.workers.devices)}"
        if not training or not pace_s or still_s < max(STILL_S, STILL_STEPS * pace_s):
            return ""
        return f"; no new step for {duration(still_s)}, a rank may be hanging"

    def _halts(self, progress: ProgressRecord | None, pace_s: float) -> bool:
        """Whether steps have stopped coming, so that a time to go would be made up."""
        still_s = self._clock.steady_s() - self._moved[2]
        return bool(progress and progress.stopped) or still_s > max(HALT_S, HALT_STEPS * pace_s)

    @staticmethod
    def write_state(run: RunDirectory, row: Mapping[str, Any], job: TrainingJob) -> None:
        """Write the state for commands that only look."""
        write_json(run.state_file, {**row, "status": job.status.model_dump(mode="json", by_alias=True)})


def _row(
    job: TrainingJob, progress: ProgressRecord | None, view: RunView, stages: Mapping[str, StageView]
) -> dict[str, Any]:
    return {
        "state": verdict(job)[0],
        "message": _waits_for(verdict(job)[1], progress, stages),
        "finished": job.status.finished,
        "attempt": view.attempt,
        "step": view.step,
        "steps": view.steps,
        "stage": progress.stage or None if progress else None,
        "loss": progress.loss if progress else None,
        "objective": dict(progress.objective) if progress else {},
        "heldOutLoss": progress.held_out_loss if progress else None,
    }


def _step(job: TrainingJob, progress: ProgressRecord | None) -> int:
    """Newest step of the run: an attempt that has not trained yet begins where its checkpoint ends."""
    if progress is None:
        return job.status.step
    saved = job.status.last_checkpoint
    return max(progress.step, progress.resumed_from_step or 0) or (saved.step if saved else 0)


def _sentence(job: TrainingJob) -> str:
    """Describe the job's state where no column shows it."""
    word, words = verdict(job)
    return f"{word.lower()}: {words}" if word in _NAMED_STATES and not words.startswith(word.lower()) else words


def _checks(progress: ProgressRecord | None) -> str:
    """Say what the checks of the nodes wait for; empty when they are done, or there are none."""
    report = None if progress is None else progress.pre_check
    return "" if report is None else report.waits


def _idle(job: TrainingJob) -> bool:
    """Whether the job neither runs nor has finished: what its last attempt said is of the past."""
    return job.status.is_true("Suspended") or (not job.status.finished and not job.status.is_true("Admitted"))


def _waits_for(sentence: str, progress: ProgressRecord | None, stages: Mapping[str, StageView]) -> str:
    """Name what the ranks wait for when it is the data."""
    if progress is not None and progress.phase is RankPhase.WAITING_FOR_DATA and stages:
        return (
            f"waiting for data: {', '.join(f'{stage.name} {stage.done} of {stage.total}' for stage in stages.values())}"
        )
    return sentence
