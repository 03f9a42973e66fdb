"""The training loop of one rank: data, forward and backward, agreement of all ranks, update, record, checkpoint.

All ranks leave the loop after the same step and for the same reason: every reason is summed in the step's all-reduce.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from polyreme_api.batch import BatchSource, EvaluationSource
from polyreme_api.clock import Clock
from polyreme_api.progress import ALL_SETS, RankPhase, StepRecord
from polyreme_api.rank_state import RankActivity
from polyreme_trainer.checkpoint.save import AfterStep, CheckpointWriter
from polyreme_trainer.model.branches import not_yet
from polyreme_trainer.model.routing import Routing, Summary
from polyreme_trainer.parallel.gradients import GlobalStep
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.rank_page import activity, check_lease, enter_step, leave_step
from polyreme_trainer.train.checkpoint_content import content
from polyreme_trainer.train.evaluation import HeldOut, held_out
from polyreme_trainer.train.learning_rate import rate_of
from polyreme_trainer.train.loss_health import times_updated
from polyreme_trainer.train.microbatches import PackReader, ReadPacks, to_microbatches
from polyreme_trainer.train.online_reference import compared, hold, reference_in_place
from polyreme_trainer.train.parameter_hash import compare_copies
from polyreme_trainer.train.recomputation import mark_of
from polyreme_trainer.train.records import ObjectStepLog, Reporter, StepLog
from polyreme_trainer.train.rollouts.rollouts import RolledOut, Rollouts
from polyreme_trainer.train.routing_tables import RoutingTable
from polyreme_trainer.train.scoring import Scoring
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.signals import Requests
from polyreme_trainer.train.state import TrainState, backward, enter, reduce, update
from polyreme_trainer.train.step_judge import Attempted, JudgedStep, StepJudge
from polyreme_trainer.train.step_work import work_of

Renew = Callable[[TrainSettings], TrainSettings]
"""Returns settings with the steps and learning rates that were fixed last for the attempt."""


Amend = Callable[[int, Callable[[str], None]], bool]
"""Fixes changes of the job that were asked for, in the step of that number, and gives the other function a sentence
on each that a user should know; tells whether ranks have something to read."""


def no_changes(number: int, note: Callable[[str], None]) -> bool:  # noqa: ARG001 - as an ``Amend``
    """Fix nothing."""
    return False


def unchanged(settings: TrainSettings) -> TrainSettings:
    """Return settings as they are."""
    return settings


class LoopEnd(enum.Enum):
    """Why the loop ended."""

    DONE = "all steps are trained"
    STOPPED = "asked to stop"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Durations of a step."""

    step_s: float
    data_wait_s: float


@dataclasses.dataclass(slots=True, kw_only=True)
class Loop:
    """Everything that a rank needs to train."""

    settings: TrainSettings
    """Its steps and learning rates may change for later steps, on all ranks in the same one."""
    state: TrainState
    source: BatchSource
    reader: PackReader
    """Reads the source's packs; nothing else walks its order."""
    rollouts: Rollouts
    """Draws the model's own answers, in stages that learn from them."""
    meshes: Meshes
    writer: CheckpointWriter
    requests: Requests
    reporter: Reporter
    log: StepLog | ObjectStepLog
    routing: RoutingTable
    evaluation: EvaluationSource | None
    """Held-out samples, for their loss during training."""
    clock: Clock
    judge: StepJudge
    amend: Amend = no_changes
    renew: Renew = unchanged

    def run(self) -> LoopEnd:
        """Train to the end or until asked to stop, and leave a committed checkpoint of the last step taken.

        Raises:
            StepFailedError: On all ranks, if loss or gradient is not finite or there is nothing to learn from, before
                any parameter changes.
            FencedError: If a newer attempt has begun, or that is not known for too long.
            EnvironmentFailedError: If checkpoints keep failing, or copies of parameters differ on other ranks.
            CopiesDifferError: If they differ on this one.
        """
        first = self.state.step + 1
        while not self.state.losses.ended(self.state.step, self.settings):
            if not self._knows_reference(self.state.step + 1):
                return LoopEnd.STOPPED
            check_lease()
            stage = self.settings.stage_at(self.state.step + 1)
            enter_step(self.state.step + 1, first=self.state.step + 1 in {first, stage.first_step})
            total, held_out = self._step()
            if self.state.step == first:
                self.meshes.communicators.limit(self.settings.rank.collective_timeout_s)
            due = self.state.step % self.settings.checkpoint.interval_steps == 0 or self._scores_next()
            saves = due or total.save or total.stop or self.state.losses.ended(self.state.step, self.settings)
            compare_copies(self.state, self.settings, self.meshes, saves=saves)
            if saves:
                with activity(RankActivity.CHECKPOINTING), self.reporter.saving():
                    self._save(held_out)
            if total.stop:
                break
        self.reporter.phase(RankPhase.CHECKPOINTING)
        with self.reporter.saving():
            self.writer.wait()
        self.reporter.stopped_early(self.state.losses.why_early(self.state.step, self.settings))
        return LoopEnd.DONE if self.state.losses.ended(self.state.step, self.settings) else LoopEnd.STOPPED

    def _scores_next(self) -> bool:
        """Whether pairs of the stage that begins with the next step are scored by the model as it is now."""
        stage = self.settings.stage_at(self.state.step + 1)
        return stage.first_step == self.state.step + 1 and stage.objective.scores_before

    def _knows_reference(self, number: int) -> bool:
        """Enter the stage of a step, and prepare its reference if it needs one; False if asked to stop meanwhile."""
        stage = self.settings.stage_at(number)
        enter(self.state, stage)
        weigher = self.state.weigher
        if weigher is None or weigher.reference is not None or not stage.objective.has_reference:
            return True
        self.writer.wait()  # the saving thread uses the same group
        scoring = Scoring(
            settings=self.settings,
            state=self.state,
            source=self.source,
            reader=self.reader,
            meshes=self.meshes,
            evaluation=self.evaluation,
            reporter=self.reporter,
            stop=lambda: self.requests.stop,
        )
        if stage.objective.scores_before:
            scores = scoring.run(stage)
            if scores is None:
                return False
            weigher.reference = scores.of
        else:
            self.state.reference = hold(stage, self.state, self.settings, self.meshes, self.writer)
            weigher.reference = not_yet
            if not stage.objective.compares:
                return True
            with reference_in_place(self.state):
                scores = scoring.held_out()
        weigher.held_out = scores.of_held_out if scores.held_out else None
        return True

    def _step(self) -> tuple[GlobalStep, HeldOut]:
        begun_s = self.clock.steady_s()
        settings, number = self.settings, self.state.step + 1
        waits_s = self.clock.steady_s()
        with activity(RankActivity.DATA_WAIT):
            packs = self.reader.take(number)
        data_wait_s = self.clock.steady_s() - waits_s
        rolled = self._rolled(packs, number)
        microbatches = compared(self.state, to_microbatches(self.state, rolled.packs, settings), self.meshes)
        stop, save = self.requests.stop, self.requests.save
        refresh, whole = self.amend(number, self.reporter.note), settings.spikes.measures_update(number)
        local = backward(self.state, *microbatches, stop=stop, save=save, refresh=refresh, whole=whole)
        attempted = Attempted(packs=rolled.packs, local=local, mark=mark_of(self.state, local)) if whole else None
        total = reduce(self.state, local, self.meshes)
        self.requests.save &= not save
        if total.refresh:
            settings = self.settings = self.renew(settings)
            self.reader.refresh(settings)
            self.reporter.steps(settings.steps)
        judged = self.judge.judge(total, number, settings, attempted)
        total = judged.total
        rate = self._update(total, number, skip=judged.spike is not None and settings.spikes.action == "Skip")
        # An accelerator may still update: the next step's one wait is for that too, so no time is lost between steps.
        routing = None if settings.rank.rank else self._summary(total)
        step_s = self.clock.steady_s() - begun_s
        leave_step(work_of(self.state, self.settings, microbatches))
        held_out = self._held_out()
        if routing is not None:
            measured = {**rolled.measures, **self._measured(total)}
            timed = Timed(step_s=step_s, data_wait_s=data_wait_s)
            self._record(judged, rate, routing, measured, timed=timed, held_out=held_out)
        return total, held_out

    def _rolled(self, packs: Sequence[ReadPacks], number: int) -> RolledOut:
        """Draw answers to a step's prompts, in a stage that learns from them."""
        objective = self.settings.stage_at(number).objective
        if not objective.answers:
            return RolledOut(packs)
        with activity(RankActivity.EVALUATING):
            return self.rollouts.of(packs, objective)

    def _held_out(self) -> HeldOut:
        """Measure held-out packs if it is due, which depends on the step alone."""
        every, step = self.settings.evaluation.every_steps, self.state.step
        if self.evaluation is None or not every or (step % every and step != self.settings.steps):
            return HeldOut(losses={}, pair_accuracy={})
        with activity(RankActivity.EVALUATING), self.reporter.evaluating():
            measured = held_out(self.state, self.settings, self.evaluation, self.meshes)
        losses, rule = self.state.losses, self.settings.evaluation.early_stop
        losses.held_out = losses.held_out.after(step, measured.losses.get(ALL_SETS), rule)
        return measured

    def _update(self, total: GlobalStep, number: int, *, skip: bool) -> float:
        """Update the model, unless the step is skipped: then nothing advances but its number. Return the rate."""
        settings, losses = self.settings, self.state.losses
        rate = rate_of(number, settings, losses.skipped)
        if skip:
            losses.skipped.append(number)
            self.state.step = number
        else:
            learned = times_updated(settings.curriculum_stages, number, losses.skipped)
            update(self.state, total, settings.optimizer, rate=rate, learned=learned)
        return rate

    def _summary(self, total: GlobalStep) -> Summary:
        chosen = self.settings.shape.decoder.experts_per_token
        return Routing.from_numbers(total.reported_MX).summary(experts_per_token=chosen)

    def _record(
        self,
        judged: JudgedStep,
        rate: float,
        routing: Summary,
        measured: Mapping[str, float],
        *,
        timed: Timed,
        held_out: HeldOut,
    ) -> None:
        total, spike = judged.total, judged.spike
        record = StepRecord(
            attempt=self.settings.rank.attempt,
            step=self.state.step,
            loss=total.loss,
            gradient_norm=total.gradient_norm,
            learning_rate=rate,
            stage=self.settings.stage_at(self.state.step).name,
            tokens=self.source.packs_in(self.state.step) * self.source.pack_tokens_in(self.state.step),
            step_s=timed.step_s,
            data_wait_s=timed.data_wait_s,
            update_norm=judged.update_norm,
            recomputed=judged.recomputed,
            spike_limit=None if spike is None else spike.limit,
            skipped=self.state.step in self.state.losses.skipped[-1:],
            held_out=held_out.losses,
            held_out_pairs=held_out.pair_accuracy,
            objective=dict(measured),
            ended_at_s=self.clock.now_s(),
            ended_steady_s=self.clock.steady_s(),
            expert_load_max=routing.load_max,
            router_entropy=routing.entropy,
            rows_dropped=routing.dropped,
        )
        self.log.write(record)
        self.routing.add(total.reported_MX, step=self.state.step)
        self.reporter.step(record, self.routing.reportable(total.reported_MX))

    def _measured(self, total: GlobalStep) -> dict[str, float]:
        weigher = self.state.weigher
        return {} if weigher is None else dict(zip(weigher.objective.metrics, total.measured, strict=False))

    def _save(self, held_out: HeldOut) -> None:
        self.log.flush()
        if self.settings.stage_at(self.state.step).objective.answers:
            self.rollouts.forget()
        self.routing.write(step=self.state.step)
        self.writer.start(
            content(self.state, self.meshes),
            step=self.state.step,
            after=AfterStep(
                loader=self.reader.state(self.state.step),
                losses=self.state.losses.saved(),
                held_out_loss=held_out.losses.get(ALL_SETS),
            ),
        )
