"""Early stop: when the held-out loss no longer falls, as a pure function of its measurements, which every rank has.

The history is part of a checkpoint, so a resumed run ends at the same step as one that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import math

from polyreme_api.commit_marker import SavedHeldOut
from polyreme_trainer.train.settings import EarlyStopRule


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOutHistory:
    """Held-out losses of all sets, as far as the rule needs them."""

    lowest: float | None = None
    """The last loss that counted as lower than those before; None: there was none."""
    lowest_step: int = 0
    misses: int = 0
    """Measurements since then."""

    def after(self, step: int, loss: float | None, rule: EarlyStopRule | None) -> HeldOutHistory:
        """Return the history with a measurement; a loss that is no number is a miss."""
        if rule is None or loss is None:
            return self
        if math.isfinite(loss) and (self.lowest is None or loss < self.lowest - rule.min_delta):
            return HeldOutHistory(loss, step)
        return dataclasses.replace(self, misses=self.misses + 1)

    def stops(self, rule: EarlyStopRule | None) -> bool:
        """Tell whether the run ends."""
        return rule is not None and self.misses >= rule.patience

    def why(self, rule: EarlyStopRule) -> str:
        """Return the sentence on a run that ends by the rule."""
        measured = f"{self.misses} measurement{'' if self.misses == 1 else 's'}"
        if self.lowest is None:
            return f"the held-out loss was no number in {measured}"
        fallen = f"fallen by more than {rule.min_delta:g} below" if rule.min_delta else "fallen below"
        return f"the held-out loss has not {fallen} {self.lowest:.4g} (step {self.lowest_step}) in {measured}"

    def saved(self) -> SavedHeldOut:
        """Return what a checkpoint keeps."""
        return SavedHeldOut(lowest=self.lowest, lowest_step=self.lowest_step, misses=self.misses)

    @classmethod
    def of(cls, saved: SavedHeldOut) -> HeldOutHistory:
        """Read what a checkpoint kept."""
        return cls(saved.lowest, saved.lowest_step, saved.misses)


NO_MEASUREMENTS = HeldOutHistory()
