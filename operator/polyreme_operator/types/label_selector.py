"""Kubernetes' LabelSelector as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from polyreme_api.label_selector import LabelSelector


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement; ``operator`` is one of In, NotIn, Exists, DoesNotExist."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = f"({', '.join(self.values)})"
        words = {
            "In": f"{self.key}={values[1:-1]}" if len(self.values) == 1 else f"{self.key} in {values}",
            "NotIn": f"{self.key} notin {values}",
            "Exists": self.key,
            "DoesNotExist": f"!{self.key}",
        }
        return words[self.operator]

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Tell whether these labels fulfil the requirement, as Kubernetes decides it."""
        found = labels.get(self.key)
        match self.operator:
            case "In":
                return found in self.values
            case "NotIn":
                return found not in self.values
            case "Exists":
                return found is not None
            case _:
                return found is None


Selector: TypeAlias = tuple[Requirement, ...]
"""All of these must hold; empty: every object is selected."""


def parse_selector(manifest: Mapping[str, Any] | None) -> Selector:
    """Parse a selector. A field that is not known is an error: without it, more objects would be selected.

    Raises:
        ValueError: If it is not what its definition says.
    """
    given = LabelSelector.model_validate(manifest or {})
    exact = (Requirement(key, "In", (value,)) for key, value in sorted(given.match_labels.items()))
    others = (Requirement(each.key, each.operator, tuple(each.values)) for each in given.match_expressions)
    return (*exact, *others)


def selects(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Tell whether an object with these labels is selected."""
    return all(requirement.holds(labels) for requirement in selector)


def words_of(selector: Selector) -> str:
    """Return a selector as ``kubectl --selector`` takes it."""
    return ",".join(str(requirement) for requirement in selector)
