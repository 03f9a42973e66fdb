"""Record of a run in its checkpoint root: what was trained, kept when the job is deleted.

The leader writes it once, by create-if-absent, when the first attempt's resume point is fixed.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from polyreme_api.job import TrainingJobSpec

PREFIX = "runs/"


class RunRecord(BaseModel):
    """``runs/<uid>.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    uid: str
    """Of the job."""
    namespace: str
    name: str
    cluster: str = ""
    """Address of the API server; empty for the embedded one."""
    version: str = ""
    """Of polyreme, in the leader's image."""
    layout: str = ""
    seed: int | None = None
    """Of the initial weights."""
    datasets: dict[str, str] = Field(default_factory=dict)
    """Version of each dataset, by the name in the spec; empty where it was not known yet."""
    spec: dict[str, Any]
    """As admitted, with defaults; without the pod template, whose environment may hold secrets."""
    written_at_s: float = 0.0


def record_key(uid: str) -> str:
    """Key of a job's record."""
    return f"{PREFIX}{uid}.json"


def recorded_spec(spec: TrainingJobSpec) -> dict[str, Any]:
    """Return the part of a job's spec that is recorded."""
    recorded: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    recorded.get("workers", {}).pop("template", None)
    return recorded
