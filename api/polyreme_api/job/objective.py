"""Objective of a stage: the text of its data, preferences between two answers, or rewards of its own answers."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from polyreme_api.fields import Coefficient, FunctionPath, Name, Part, Text

BETA_MAX = 1000.0
TEMPERATURE_MAX = 10.0


class Reference(Part):
    """The model that a preference is measured against."""

    scores: Literal["Cached", "Online"] = "Cached"
    """``Cached``: every pair is scored once, before the stage's first step; jobs with the same reference and data share
    the scores. ``Online``: in each step, by one more forward with a copy of the weights in memory."""
    name: Name | None = None
    """Another model whose scores other programs write under this name; none: the weights with which the stage begins,
    scored by the job itself."""

    @model_validator(mode="after")
    def _scores_of_a_name_are_stored(self) -> "Reference":
        if self.name is not None and self.scores == "Online":
            raise ValueError(
                f"reference.name {self.name!r} cannot be combined with scores Online: other programs store its scores "
                "before the first step; use scores: Cached, or leave name out"
            )
        return self


class GenerationParallelism(Part):
    """Layout in which ranks draw answers: data-parallel, each with all layers."""

    ep: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Expert-parallel degree; divides the ranks."""


class Generation(Part):
    """How answers are drawn."""

    parallelism: GenerationParallelism | None = None
    """Another layout than training's; ranks then hold a second copy of the weights, sent in each step."""
    replay_routing: bool = False
    """Training sends tokens to the experts they went to when drawn; the step's record holds the choices."""
    weights: Literal["Auto", "Int4"] = "Auto"
    """Weights that draw: those in training, or copies in 4 bits as in ``evaluation.weights``; ``correction`` weighs
    what that changes."""


class Objective(Part):
    """What a stage optimises."""

    kind: Literal["Supervised", "Preference", "GroupRelative"] = "Supervised"
    """``Supervised``: cross-entropy of the answers. ``Preference``: the chosen answer of a pair above the rejected
    one (DPO). ``GroupRelative``: the model's own answers by their reward (GRPO, arXiv:2402.03300)."""
    loss: Literal["Sigmoid", "SigmoidNorm", "IPO"] = "Sigmoid"
    """Of a pair's margin: ``Sigmoid`` (arXiv:2305.18290), ``SigmoidNorm`` with each answer's score divided by its
    tokens, ``IPO`` squared, also by tokens (arXiv:2310.12036)."""
    beta: Coefficient = "0.1"
    """Scale of the margin; a larger one stays nearer to the reference."""
    label_smoothing: Coefficient = "0"
    """Share of pairs taken to be the wrong way round, below 0.5; not with ``IPO``."""
    supervised_weight: Coefficient = "0"
    """Weight of the chosen answer's mean cross-entropy, added to the loss."""
    reference: Reference = Field(default_factory=Reference)
    """The model that a preference is measured against."""
    reward: FunctionPath | None = None
    """``module:function`` that rewards an answer; it runs in a sandbox."""
    reward_arguments: Annotated[dict[str, Text], Field(max_length=16)] = Field(default_factory=dict)
    """Further arguments of that function."""
    samples: Annotated[int, Field(ge=2, le=64)] = 8
    """Answers to each prompt."""
    answer_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    """Longest answer; one that reaches it without an end is not learned."""
    temperature: Coefficient = "1"
    """Of the draws, above 0."""
    aggregation: Literal["Tokens", "Sequences"] = "Tokens"
    """The loss's mean: over all tokens of a step, or of each answer first."""
    advantage: Literal["Mean", "MeanAndDeviation"] = "Mean"
    """Reward less the mean of its prompt's answers; or divided by their deviation, too."""
    correction: Literal["None", "Token", "Sequence"] = "Token"
    """Weight for what generation and training compute unlike: the ratio of their probabilities, truncated."""
    correction_limit: Coefficient = "2"
    """Largest such weight, at least 1."""
    kl: Coefficient = "0"
    """Weight of the distance to the stage's first weights; above 0 holds a copy of them."""
    generation: Generation | None = None
    """How answers are drawn; none: in training's layout."""

    @property
    def compares(self) -> bool:
        """Whether it takes pairs of answers, which are compared with a reference's."""
        return self.kind == "Preference"

    @property
    def answers(self) -> bool:
        """Whether the model learns from its own answers."""
        return self.kind == "GroupRelative"

    @property
    def replays_routing(self) -> bool:
        """Whether training sends tokens to the experts that they went to when they were drawn."""
        return self.generation is not None and self.generation.replay_routing

    @property
    def drawn_in_int4(self) -> bool:
        """Whether answers are drawn with weights in 4 bits."""
        return self.generation is not None and self.generation.weights == "Int4"

    @property
    def judges_loss(self) -> bool:
        """Whether a jump of loss or gradient is a spike; the loss of own answers is about 0, and says nothing."""
        return not self.answers

    @property
    def scores_before(self) -> bool:
        """Whether all pairs are scored before the stage's first step."""
        return self.compares and self.reference.scores == "Cached"

    @property
    def has_reference(self) -> bool:
        """Whether answers are compared with a reference's."""
        return self.scores_before or self.holds_reference

    @property
    def holds_reference(self) -> bool:
        """Whether it needs a copy of the stage's first weights in memory."""
        return (self.compares and self.reference.scores == "Online") or (self.answers and float(self.kl) > 0)

    @property
    def answer_room(self) -> int:
        """Tokens that its answers add to a sample's own, at most."""
        return self.samples * self.answer_tokens if self.answers else 0

    @field_validator("beta")
    @classmethod
    def _some_scale(cls, text: str) -> str:
        if not 0 < float(text) <= BETA_MAX:
            raise ValueError(f"beta {text} is outside its range: above 0, at most {BETA_MAX:g}")
        return text

    @model_validator(mode="after")
    def _fields_of_its_kind(self) -> "Objective":
        for kind, names in FIELDS_OF.items():
            # An API server fills defaults in, so only what differs from them was given.
            given = [name for name in names if getattr(self, name) != _default(name)]
            if given and self.kind != kind:
                raise ValueError(
                    f"{to_camel(given[0])} is given for kind {self.kind}; only kind {kind} has it: use kind: {kind}, "
                    "or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _of_pairs(self) -> "Objective":
        smoothing = float(self.label_smoothing)
        if not 0 <= smoothing < 0.5:
            raise ValueError(f"labelSmoothing {self.label_smoothing} is outside its range: from 0 to below 0.5")
        if smoothing and self.loss == "IPO":
            raise ValueError(
                f"labelSmoothing {self.label_smoothing} cannot be combined with loss IPO, which has no sigmoid to "
                "smooth; leave it out, or use loss: Sigmoid"
            )
        return self

    @model_validator(mode="after")
    def _of_answers(self) -> "Objective":
        if not self.answers:
            return self
        if self.reward is None:
            raise ValueError("reward is missing for kind GroupRelative; name a function as module:function")
        if not 0 < float(self.temperature) <= TEMPERATURE_MAX:
            raise ValueError(
                f"temperature {self.temperature} is outside its range: above 0, at most {TEMPERATURE_MAX:g}"
            )
        if float(self.correction_limit) < 1:
            raise ValueError(f"correctionLimit {self.correction_limit} is outside its range: at least 1")
        return self


FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "Preference": ("loss", "beta", "label_smoothing", "supervised_weight", "reference"),
    "GroupRelative": (
        "reward",
        "reward_arguments",
        "samples",
        "answer_tokens",
        "temperature",
        "aggregation",
        "advantage",
        "correction",
        "correction_limit",
        "kl",
        "generation",
    ),
}
"""Fields that only one kind has."""


def _default(name: str) -> object:
    return Objective.model_fields[name].get_default(call_default_factory=True)
