"""Selector of objects by their labels, as Kubernetes' own LabelSelector."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from polyreme_api.fields import Part

REQUIREMENTS_MAX = 32
VALUES_MAX = 64

LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
LabelValue = Annotated[str, StringConstraints(max_length=63)]


class LabelRequirement(Part):
    """One requirement of a selector."""

    key: LabelKey
    """Label that the requirement is about."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label's value relates to ``values``. ``NotIn`` and ``DoesNotExist`` hold where there is no such label."""
    values: Annotated[list[LabelValue], Field(max_length=VALUES_MAX)] = Field(default_factory=list)
    """Values of ``In`` and ``NotIn``."""

    @model_validator(mode="after")
    def _has_values(self) -> "LabelRequirement":
        if bool(self.values) != (self.operator in {"In", "NotIn"}):
            raise ValueError(
                f"operator {self.operator} of {self.key} with {len(self.values)} values: In and NotIn need values, "
                "Exists and DoesNotExist have none; change operator or values"
            )
        return self


class LabelSelector(Part):
    """Labels that an object must have: all of these requirements."""

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=REQUIREMENTS_MAX)] = Field(default_factory=dict)
    """Labels with their values."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=REQUIREMENTS_MAX)] = Field(
        default_factory=list
    )
    """Requirements of other kinds."""
