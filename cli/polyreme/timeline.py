"""When attempts began, were released and ended: lines that the serving process appends, across its own restarts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Kind = Literal["attempt", "released", "fault", "finished"]
FILE = "timeline.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to an attempt."""

    at_s: float
    """When [s since the epoch]."""
    kind: Kind
    attempt: int
    text: str = ""
    """Scope of a new attempt, the injected fault, or the final reason."""


class Timeline:
    """The moments of one run, each once."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._moments = read_timeline(directory)

    @property
    def moments(self) -> Sequence[Moment]:
        """All moments so far, in order."""
        return self._moments

    def has(self, kind: Kind, attempt: int) -> bool:
        """Tell whether a moment of this kind is known of the attempt."""
        return any(moment.kind == kind and moment.attempt == attempt for moment in self._moments)

    def add(self, moment: Moment) -> None:
        """Append a moment; a second one of the same kind and attempt is dropped, except for faults."""
        if moment.kind != "fault" and self.has(moment.kind, moment.attempt):
            return
        self._moments.append(moment)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dataclasses.asdict(moment)) + "\n")


def read_timeline(directory: Path) -> list[Moment]:
    """Read the moments of a run; a torn last line is none."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [Moment(**json.loads(line)) for line in lines if line.endswith("\n")]
