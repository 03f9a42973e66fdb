"""Rules of rollbacks after spikes of the loss: there must be a checkpoint from before the window."""

from __future__ import annotations

from polyreme_api.crd.rule import Rule
from polyreme_api.job.workers import EVERY_STEPS, KEEP

_ROLLS_BACK = "has(self.health) && self.health.loss.action == 'Rollback'"
# The server fills ``checkpoint`` only if the user begins it.
_EVERY, _KEEP = (
    f"(has(self.checkpoint) ? self.checkpoint.{name} : {default})"
    for name, default in (("everySteps", EVERY_STEPS), ("keep", KEEP))
)
_KEPT = f"({_KEEP} * {_EVERY})"

ROLLBACK_RULES = (
    Rule(
        rule=f"!({_ROLLS_BACK}) || self.workers.runtime.mode != 'Environment'",
        words="health.loss.action {self.health.loss.action} needs checkpoints of the ranks, and workers.runtime.mode "
        "Environment has none; use action: Notify",
        plain="health.loss.action Rollback needs checkpoints of the ranks, and workers.runtime.mode Environment has "
        "none; use action: Notify",
        of_optional=True,
    ),
    Rule(
        rule=f"!({_ROLLS_BACK}) || !has(self.training) || !has(self.training.steps) || {_EVERY} < self.training.steps",
        words="health.loss.action Rollback needs checkpoints, and the first is saved at step "
        f"{{{_EVERY}}} of {{self.training.steps}}; lower checkpoint.everySteps",
        plain="health.loss.action Rollback needs a checkpoint before the last step; lower checkpoint.everySteps",
        of_optional=True,
    ),
    Rule(
        rule=f"!({_ROLLS_BACK}) || self.health.loss.windowSteps >= {_EVERY}",
        words="health.loss.windowSteps {self.health.loss.windowSteps} is below checkpoint.everySteps "
        f"{{{_EVERY}}}, and a rollback goes back by whole checkpoints; raise windowSteps or lower "
        "everySteps",
        plain="health.loss.windowSteps is below checkpoint.everySteps, and a rollback goes back by whole checkpoints; "
        "raise windowSteps or lower everySteps",
        of_optional=True,
    ),
    Rule(
        rule=f"!({_ROLLS_BACK}) || self.health.loss.windowSteps <= {_KEPT}",
        words=f"health.loss.windowSteps {{self.health.loss.windowSteps}} is above the {{{_KEPT}}} steps that "
        f"checkpoint.keep {{{_KEEP}}} x everySteps {{{_EVERY}}} covers; raise keep or lower "
        "windowSteps",
        plain="health.loss.windowSteps is above checkpoint.keep x everySteps; raise keep or lower windowSteps",
        of_optional=True,
    ),
    Rule(
        rule=f"!({_ROLLS_BACK}) || !has(self.checkpoint) || !has(self.checkpoint.maxAgeSeconds)",
        words="checkpoint.maxAgeSeconds {self.checkpoint.maxAgeSeconds} could delete the checkpoint that "
        "health.loss.action Rollback needs; drop maxAgeSeconds",
        plain="checkpoint.maxAgeSeconds could delete the checkpoint that health.loss.action Rollback needs; drop "
        "maxAgeSeconds",
        of_optional=True,
    ),
)
