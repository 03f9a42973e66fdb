"""Loss health: which steps are spikes, as a pure function of the losses and gradient norms that every rank has.

A step is a spike if its loss is above ``median + max(k * deviation, 2 % of the median)`` of the window's steps, or its
gradient norm above the same limit of their logarithms, at least doubled; the deviation is the median distance from the
median. Both figures have the same bits on all ranks, so all decide alike without an exchange. The window is part of a
checkpoint: a resumed run decides as one that was never interrupted.

Three things end the window: a declared change (stage, mixture, corner of the learning rate), a level that lasts
(``LASTING_STEPS`` spikes in a row are the new level), and another run. Until half of it is filled again nothing is a
spike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from polyreme_api.commit_marker import SavedLossHistory
from polyreme_api.errors import StepFailedError
from polyreme_planner.curriculum import CurriculumStage, Learner, stage_at, times_learned
from polyreme_trainer.train.early_stop import NO_MEASUREMENTS, HeldOutHistory
from polyreme_trainer.train.learning_rate import rate_of
from polyreme_trainer.train.settings import SpikeRule, TrainSettings

LASTING_STEPS = 32
"""Spikes in a row after which the level counts as the new one: a rule without such an end skips without end."""
NOT_FINITE_MAX = 3
"""Skipped steps in a row that may have no finite loss or gradient."""
LOSS_RISE_MIN = 0.02
"""Smallest rise of a loss that is a spike, as a share of the median."""
NORM_RISE_MIN = math.log(2.0)
"""Smallest rise of the logarithm of a gradient norm that is a spike."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A step whose loss or gradient norm is out of line."""

    step: int
    what: str
    """``loss`` or ``gradient norm``."""
    seen: float
    limit: float

    def __str__(self) -> str:
        """Name what was seen and the limit."""
        return f"spike in step {self.step}: {self.what} {self.seen:.4g}, limit {self.limit:.4g}"


@dataclasses.dataclass(slots=True)
class LossHistory:
    """The window of a run, and the steps that were skipped."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    in_a_row: int = 0
    """Spikes since the last step that was none."""
    skipped: list[int] = dataclasses.field(default_factory=list)
    held_out: HeldOutHistory = NO_MEASUREMENTS

    def judge(self, step: int, loss: float, norm: float, rule: SpikeRule) -> Spike | None:
        """Return the spike that a step is, and take its figures into the window if it is none."""
        spike = self._spike(step, loss, norm, rule)
        if spike is not None:
            self.in_a_row += 1
            if self.in_a_row < LASTING_STEPS or not math.isfinite(loss + norm):
                return spike
            self.forget()
        self.in_a_row = 0
        self.losses, self.norms = [*self.losses, loss], [*self.norms, norm]
        del self.losses[: -rule.window_steps], self.norms[: -rule.window_steps]
        return None

    def ended(self, step: int, settings: TrainSettings) -> bool:
        """Tell whether no step is left to train after one."""
        return step >= settings.steps or self.held_out.stops(settings.evaluation.early_stop)

    def why_early(self, step: int, settings: TrainSettings) -> str:
        """Return why a run ends after a step that is not its last; empty if it does not."""
        rule = settings.evaluation.early_stop
        return self.held_out.why(rule) if rule and step < settings.steps and self.held_out.stops(rule) else ""

    def forget(self) -> None:
        """Begin a new window."""
        self.losses, self.norms, self.in_a_row = [], [], 0

    def _spike(self, step: int, loss: float, norm: float, rule: SpikeRule) -> Spike | None:
        if not math.isfinite(loss):
            return Spike(step=step, what="loss", seen=loss, limit=math.inf)
        if not math.isfinite(norm):
            return Spike(step=step, what="gradient norm", seen=norm, limit=math.inf)
        if len(self.losses) < rule.window_steps // 2:
            return None
        limit = _limit(self.losses, rule, least=LOSS_RISE_MIN)
        if loss > limit:
            return Spike(step=step, what="loss", seen=loss, limit=limit)
        if norm > 0.0 and (logarithms := [math.log(known) for known in self.norms if known > 0.0]):
            limit = math.exp(min(_limit(logarithms, rule, rise=NORM_RISE_MIN), 700.0))
            if norm > limit:
                return Spike(step=step, what="gradient norm", seen=norm, limit=limit)
        return None

    def saved(self) -> SavedLossHistory:
        """Return what a checkpoint keeps."""
        return SavedLossHistory(
            losses=tuple(self.losses),
            gradient_norms=tuple(self.norms),
            in_a_row=self.in_a_row,
            skipped=tuple(self.skipped),
            held_out=self.held_out.saved(),
        )

    @classmethod
    def of(cls, saved: SavedLossHistory | None) -> LossHistory:
        """Read what a checkpoint kept; one of an earlier release has nothing."""
        if saved is None:
            return cls()
        held_out = HeldOutHistory.of(saved.held_out)
        return cls(list(saved.losses), list(saved.gradient_norms), saved.in_a_row, list(saved.skipped), held_out)


def _limit(values: Sequence[float], rule: SpikeRule, *, least: float = 0.0, rise: float = 0.0) -> float:
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + max(rule.deviations * deviation, least * abs(middle), rise)


def is_corner(step: int, settings: TrainSettings, skipped: Sequence[int] = ()) -> bool:
    """Tell whether the learning rate begins to rise, fall or stay with a step."""
    if step <= 2:
        return False
    earlier, before, now = (rate_of(number, settings, skipped) for number in (step - 2, step - 1, step))
    return _sign(before - earlier) != _sign(now - before)


def _sign(number: float) -> int:
    return (number > 0.0) - (number < 0.0)


def times_updated(stages: Sequence[CurriculumStage], step: int, skipped: Iterable[int]) -> dict[Learner, int]:
    """Return how often each part that learns in a step was updated, including this step: skipped steps don't count."""
    learners = [stage_at(stages, number).learners for number in skipped if number < step]
    times = times_learned(stages, step)
    return {learner: count - sum(learner in parts for parts in learners) for learner, count in times.items()}


def check_finite(history: LossHistory, step: int, loss: float, norm: float, rule: SpikeRule) -> None:
    """Refuse a step that is not finite, unless it may be skipped or rolled back.

    Raises:
        StepFailedError: If it is not, and may not be.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    if rule.action == "Rollback" or (rule.action == "Skip" and history.in_a_row < NOT_FINITE_MAX):
        return
    raise StepFailedError(
        f"loss or gradient is not finite: loss {loss}, gradient norm {norm} in step {step}",
        field="spec.training.optimizer.learningRate, or the data of that step",
    )
