"""Verdict on a step before its update: is it a spike, does it stay one when it is computed again, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_api.errors import StepFailedError
from polyreme_api.rank_state import RankActivity
from polyreme_trainer.checkpoint.save import CheckpointWriter
from polyreme_trainer.parallel.gradients import GlobalStep, LocalStep, gradient_scale
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.rank_page import activity
from polyreme_trainer.train.loss_health import Spike, check_finite, is_corner, times_updated
from polyreme_trainer.train.microbatches import ReadPacks
from polyreme_trainer.train.recomputation import Mark, recompute
from polyreme_trainer.train.records import Reporter
from polyreme_trainer.train.rollback import RollBack, no_rollback, rolled_back
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, reduce
from polyreme_trainer.train.update_norm import update_norm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """A step, and the verdict on it."""

    total: GlobalStep
    update_norm: float | None
    """None where it was not measured."""
    recomputed: str = ""
    """What was found when it was computed again; empty: it was not."""
    spike: Spike | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A step as this rank has trained it once, for another time."""

    packs: Sequence[ReadPacks]
    local: LocalStep
    mark: Mark


@dataclasses.dataclass(frozen=True, slots=True)
class StepJudge:
    """Judges the steps of a rank; every rank finds the same."""

    state: TrainState
    meshes: Meshes
    writer: CheckpointWriter
    reporter: Reporter
    roll_back: RollBack = no_rollback

    def judge(self, total: GlobalStep, number: int, settings: TrainSettings, attempted: Attempted | None) -> JudgedStep:
        """Judge a step whose gradients are summed.

        Args:
            total: What the ranks agreed on.
            number: Of the step.
            settings: Of the step.
            attempted: How it was trained; None: it is not computed again.

        Raises:
            StepFailedError: On all ranks, if it has nothing to learn from, if it is not finite, or if it is a spike and
                the job stops then.
            PolyremeError: On all ranks, if it is a spike and the job rolls back then.
        """
        self._declare(number, settings)
        seen = JudgedStep(total=total, update_norm=self._update_norm(total, number, settings))
        if attempted is not None and self._spike(seen, number, settings) is not None:
            seen = self._recomputed(attempted, number, settings)
        if not seen.total.counted:
            raise StepFailedError(f"step {number} has nothing to learn from: 0 unmasked tokens", field="spec.data")
        losses, rule, total = self.state.losses, settings.spikes, seen.total
        check_finite(losses, number, total.loss, total.gradient_norm, rule)
        if self._is_not_judged(total, number, settings):
            return seen
        spike = losses.judge(number, total.loss, total.gradient_norm, rule, seen.update_norm)
        if spike is not None:
            self._answer(spike, rule.action, seen.recomputed)
        return dataclasses.replace(seen, spike=spike)

    def _answer(self, spike: Spike, action: str, recomputed: str) -> None:
        found = f"; {recomputed}" if recomputed else ""
        if action == "Stop":
            raise StepFailedError(f"{spike}{found}", field="spec.health.loss, or the data of that step")
        if action == "Rollback":
            self.writer.wait()  # a save in flight uses the same group, and may commit what is rejected
            raise rolled_back(spike, self.roll_back, self.meshes.control_group)
        self.reporter.note(f"{spike}{found}; {'the step was skipped' if action == 'Skip' else 'training continues'}")

    def _recomputed(self, attempted: Attempted, number: int, settings: TrainSettings) -> JudgedStep:
        """Train a step that is a spike once more, which tells whether a rank computes wrongly."""
        self.writer.wait()  # a save in flight uses the same group
        with activity(RankActivity.EVALUATING):
            again, found = recompute(
                self.state,
                attempted.packs,
                settings,
                self.meshes,
                first=attempted.mark,
                requested=attempted.local,
            )
            total = reduce(self.state, again, self.meshes)
        seen = JudgedStep(total=total, update_norm=self._update_norm(total, number, settings), recomputed=found)
        if self._spike(seen, number, settings) is None:
            seen = dataclasses.replace(seen, recomputed=found or "computed again, the spike was not reproduced")
            self.reporter.note(f"spike in step {number}: {seen.recomputed}")
        return seen

    def _update_norm(self, total: GlobalStep, number: int, settings: TrainSettings) -> float | None:
        """Measure the update of a step, where that is due and possible."""
        if not (settings.spikes.measures_update(number) and total.finite):
            return None
        scale = gradient_scale(total, norm_max=settings.optimizer.gradient_norm_max)
        learned = times_updated(settings.curriculum_stages, number, self.state.losses.skipped)
        return update_norm(self.state.flat, self.state.optimizer, self.meshes, gradient_scale=scale, learned=learned)

    def _declare(self, number: int, settings: TrainSettings) -> None:
        """Begin a new window where the job itself changes the loss."""
        declared = settings.stage_at(number).first_step == number or number in settings.mixture_steps
        if declared or is_corner(number, settings, self.state.losses.skipped):
            self.state.losses.forget()

    def _spike(self, seen: JudgedStep, number: int, settings: TrainSettings) -> Spike | None:
        """Return the spike that a step is; nothing is kept of it."""
        total = seen.total
        if self._is_not_judged(total, number, settings):
            return None
        return self.state.losses.spike_of(number, total.loss, total.gradient_norm, settings.spikes, seen.update_norm)

    def _is_not_judged(self, total: GlobalStep, number: int, settings: TrainSettings) -> bool:
        return total.finite and not settings.stage_at(number).objective.judges_loss
