"""Loss health: which steps are spikes, as a pure function of the losses and norms that every rank has.

A step is a spike if its loss is above ``median + max(k * deviation, 2 % of the median)`` of the window's steps, or its
gradient norm or the norm of its update above the same limit of their logarithms, at least doubled; the deviation is the
median distance from the median. All figures have the same bits on all ranks, so all decide alike without an exchange.
The window is part of a checkpoint: a resumed run decides as one that was never interrupted.

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
"""Smallest rise of the logarithm of a norm that is a spike."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A step whose loss, gradient norm or update norm is out of line."""

    step: int
    what: str
    """``loss``, ``gradient norm`` or ``update norm``."""
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
    update_norms: list[float] = dataclasses.field(default_factory=list)
    """Of the steps in which they are measured."""
    in_a_row: int = 0
    """Spikes since the last step that was none."""
    skipped: list[int] = dataclasses.field(default_factory=list)
    held_out: HeldOutHistory = NO_MEASUREMENTS

    def judge(
        self, step: int, loss: float, norm: float, rule: SpikeRule, update_norm: float | None = None
    ) -> Spike | None:
        """Return the spike that a step is, and take its figures into the window if it is none."""
        spike = self.spike_of(step, loss, norm, rule, update_norm)
        if spike is not None:
            self.in_a_row += 1
            if self.in_a_row < LASTING_STEPS or not math.isfinite(loss + norm):
                return spike
            self.forget()
        self.in_a_row = 0
        self.losses, self.norms = [*self.losses, loss], [*self.norms, norm]
        del self.losses[: -rule.window_steps], self.norms[: -rule.window_steps]
        if update_norm is not None:
            self.update_norms = [*self.update_norms, update_norm][-_measured(rule) :]
        return None

    def ended(self, step: int, settings: TrainSettings) -> bool:
        """Tell whether no step is left to train after one."""
        return step >= settings.steps or self.held_out.stops(settings.evaluation.early_stop)

    def why_early(self, step: int, settings: TrainSettings) -> str:
        """Return why a run ends after a step that is not its last; empty if it does not."""
        rule = settings.evaluation.early_stop
        return self.held_out.why(rule) if rule and step < settings.steps and self.held_out.stops(rule) else ""

    def spike_of(
        self, step: int, loss: float, norm: float, rule: SpikeRule, update_norm: float | None = None
    ) -> Spike | None:
        """Return the spike that a step is; the window stays."""
        return self._spike(step, loss, norm, rule) or self._update_spike(step, update_norm, rule)

    def forget(self) -> None:
        """Begin a new window."""
        self.losses, self.norms, self.update_norms, self.in_a_row = [], [], [], 0

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
        return _norm_spike(step, "gradient norm", norm, self.norms, rule)

    def _update_spike(self, step: int, norm: float | None, rule: SpikeRule) -> Spike | None:
        if norm is None or len(self.update_norms) < _measured(rule) // 2:
            return None
        return _norm_spike(step, "update norm", norm, self.update_norms, rule)

    def saved(self) -> SavedLossHistory:
        """Return what a checkpoint keeps."""
        return SavedLossHistory(
            losses=tuple(self.losses),
            gradient_norms=tuple(self.norms),
            update_norms=tuple(self.update_norms),
            in_a_row=self.in_a_row,
            skipped=tuple(self.skipped),
            held_out=self.held_out.saved(),
        )

    @classmethod
    def of(cls, saved: SavedLossHistory | None) -> LossHistory:
        """Read what a checkpoint kept; one of an earlier release has nothing."""
        if saved is None:
            return cls()
        return cls(
            losses=list(saved.losses),
            norms=list(saved.gradient_norms),
            update_norms=list(saved.update_norms),
            in_a_row=saved.in_a_row,
            skipped=list(saved.skipped),
            held_out=HeldOutHistory.of(saved.held_out),
        )


def _measured(rule: SpikeRule) -> int:
    """Count the steps of a window in which the update is measured."""
    return rule.window_steps // max(1, rule.update_norm_steps)


def _norm_spike(step: int, what: str, norm: float, known: Sequence[float], rule: SpikeRule) -> Spike | None:
    if norm <= 0.0 or not (logarithms := [math.log(each) for each in known if each > 0.0]):
        return None
    limit = math.exp(min(_limit(logarithms, rule, rise=NORM_RISE_MIN), 700.0))
    return Spike(step=step, what=what, seen=norm, limit=limit) if norm > limit else None


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
