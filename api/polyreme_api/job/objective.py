"""Objective of a stage: the text of its data, or preferences between two answers."""

from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from polyreme_api.fields import Coefficient, Name, Part

BETA_MAX = 1000.0


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


class Objective(Part):
    """What a stage optimises."""

    kind: Literal["Supervised", "Preference"] = "Supervised"
    """``Supervised``: cross-entropy of the answers. ``Preference``: the chosen answer of a pair above the rejected
    one (DPO); its sources hold pairs, and the router's biases stay as they are."""
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

    @property
    def compares(self) -> bool:
        """Whether answers are compared with a reference's."""
        return self.kind != "Supervised"

    @property
    def scores_before(self) -> bool:
        """Whether all pairs are scored before the stage's first step."""
        return self.compares and self.reference.scores == "Cached"

    @field_validator("beta")
    @classmethod
    def _some_scale(cls, text: str) -> str:
        if not 0 < float(text) <= BETA_MAX:
            raise ValueError(f"beta {text} is outside its range: above 0, at most {BETA_MAX:g}")
        return text

    @model_validator(mode="after")
    def _fields_of_its_kind(self) -> "Objective":
        if self.kind == "Supervised":
            # An API server fills defaults in, so only what differs from them was given.
            plain = Objective.model_construct()
            given = [
                name
                for name in type(self).model_fields
                if name != "kind" and getattr(self, name) != getattr(plain, name)
            ]
            if given:
                raise ValueError(
                    f"{to_camel(given[0])} is given for kind Supervised; only kind Preference has it: add "
                    "kind: Preference, or leave it out"
                )
            return self
        smoothing = float(self.label_smoothing)
        if not 0 <= smoothing < 0.5:
            raise ValueError(f"labelSmoothing {self.label_smoothing} is outside its range: from 0 to below 0.5")
        if smoothing and self.loss == "IPO":
            raise ValueError(
                f"labelSmoothing {self.label_smoothing} cannot be combined with loss IPO, which has no sigmoid to "
                "smooth; leave it out, or use loss: Sigmoid"
            )
        return self
