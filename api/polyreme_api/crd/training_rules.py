"""Rules across fields of a job's training, its stages and their objectives (``rules``)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.alias_generators import to_camel

from polyreme_api.crd.rule import Rule
from polyreme_api.job.model import CAPACITY_FACTOR_MAX
from polyreme_api.job.objective import BETA_MAX, FIELDS_OF, TEMPERATURE_MAX, Objective

_PLAIN = Objective()
_STAGE_STEPS = "self.stages.map(s, s.steps).sum()"


def _plain(name: str) -> str:
    """Return a rule that holds where an objective's field has its default."""
    own, value = f"self.{to_camel(name)}", getattr(_PLAIN, name)
    if value is None:
        return f"!has({own})"
    if name == "reference":
        return f"!has({own}.name) && {own}.scores == '{_PLAIN.reference.scores}'"
    if isinstance(value, dict):
        return f"size({own}) == 0"
    return f"{own} == {value}" if isinstance(value, int) else f"{own} == '{value}'"


TRAINING_RULES: Mapping[str, tuple[Rule, ...]] = {
    "Evaluation": (
        Rule(
            rule="!has(self.earlyStop) || self.everySteps > 0",
            words="earlyStop needs the held-out loss during training, everySteps is {self.everySteps}; give the steps "
            "between two measurements",
            of_optional=True,
        ),
        Rule(
            rule="!has(self.thinkingTokensMax) || self.thinkingTokensMax < self.answerTokensMax",
            words="thinkingTokensMax {self.thinkingTokensMax} leaves no token of answerTokensMax "
            "{self.answerTokensMax} for the answer; raise answerTokensMax, or lower thinkingTokensMax",
            of_optional=True,
        ),
    ),
    "Training": (
        Rule(
            rule="has(self.steps) != has(self.epochs)",
            words="exactly one of steps and epochs is given, seen {has(self.steps) ? 'both' : 'neither'}; set steps, "
            "or epochs to end by the data",
        ),
        Rule(
            rule="!has(self.epochs) || !has(self.stages) || size(self.stages) == 0",
            words="epochs {self.epochs} cannot be combined with stages, which begin at fixed steps; give steps instead",
        ),
        Rule(
            rule="!has(self.capacityFactor) || (double(self.capacityFactor) > 0.0 && "
            f"double(self.capacityFactor) <= {CAPACITY_FACTOR_MAX}.0)",
            words="capacityFactor {self.capacityFactor} is outside its range: above 0, at most "
            f"{CAPACITY_FACTOR_MAX}; leave it out to drop no rows",
            of_optional=True,
        ),
        Rule(
            rule="self.parameterSharding == 'None' || self.optimizer.name != 'Muon'",
            words="parameterSharding {self.parameterSharding} cannot be combined with optimizer.name Muon, which needs "
            "whole matrices; use AdamW, or parameterSharding: None with optimizer.stateSharding: Sharded",
        ),
        Rule(
            rule="self.parameterSharding == 'None' || self.optimizer.stateSharding != 'Whole'",
            words="parameterSharding {self.parameterSharding} also shards the state of the optimizer, but "
            "optimizer.stateSharding is Whole; leave stateSharding out, or use parameterSharding: None",
        ),
        Rule(
            rule="!has(self.capacityFactor) || !has(self.stages) || "
            "!self.stages.exists(s, has(s.objective) && s.objective.kind != 'Supervised')",
            words="capacityFactor {self.capacityFactor} cannot be combined with an objective that is not Supervised: "
            "which rows are dropped depends on their neighbours, so scores could not be compared; leave it out",
            of_optional=True,
        ),
        Rule(
            rule=f"!has(self.stages) || size(self.stages) == 0 || !has(self.steps) || {_STAGE_STEPS} == self.steps",
            words=f"steps of stages add up to {{{_STAGE_STEPS}}}, steps is {{self.steps}}; "
            f"change steps to {{{_STAGE_STEPS}}}, or those of a stage",
            plain="steps of stages do not add up to steps; change one of them",
            of_optional=True,
        ),
    ),
    "Stage": (
        Rule(
            rule="!has(self.weights) || size(self.weights) == 0 || self.weights.exists(w, w.weight > 0)",
            words="every weight of stage {self.name} is 0; raise one, or leave weights out",
            plain="every weight of a stage is 0; raise one, or leave weights out",
        ),
    ),
    "Objective": (
        *(
            Rule(
                rule=f"self.kind == '{kind}' || {' && '.join(map(_plain, names))}",
                words=f"{', '.join(map(to_camel, names))}: one is given for kind {{self.kind}}; only kind {kind} has "
                f"them: use kind: {kind}, or leave them out",
            )
            for kind, names in FIELDS_OF.items()
        ),
        Rule(
            rule="self.kind != 'GroupRelative' || has(self.reward)",
            words="reward is missing for kind {self.kind}; name a function as module:function",
        ),
        Rule(
            rule=f"double(self.temperature) > 0.0 && double(self.temperature) <= {TEMPERATURE_MAX}",
            words=f"temperature {{self.temperature}} is outside its range: above 0, at most {TEMPERATURE_MAX:g}; "
            "change it",
        ),
        Rule(
            rule="double(self.correctionLimit) >= 1.0",
            words="correctionLimit {self.correctionLimit} is outside its range: at least 1; change it",
        ),
        Rule(
            rule="!has(self.reference.name) || self.reference.scores == 'Cached'",
            words="reference.name {self.reference.name} cannot be combined with scores {self.reference.scores}: other "
            "programs store its scores before the first step; use scores: Cached, or leave name out",
            plain="reference.name cannot be combined with scores Online; use scores: Cached, or leave name out",
        ),
        Rule(
            rule=f"double(self.beta) > 0.0 && double(self.beta) <= {BETA_MAX}",
            words=f"beta {{self.beta}} is outside its range: above 0, at most {BETA_MAX:g}; change it",
        ),
        Rule(
            rule="double(self.labelSmoothing) < 0.5",
            words="labelSmoothing {self.labelSmoothing} is outside its range: from 0 to below 0.5; change it",
        ),
        Rule(
            rule="double(self.labelSmoothing) == 0.0 || self.loss != 'IPO'",
            words="labelSmoothing {self.labelSmoothing} cannot be combined with loss {self.loss}, which has no sigmoid "
            "to smooth; leave it out, or use loss: Sigmoid",
        ),
    ),
}
