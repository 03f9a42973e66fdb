"""Times of attempts: begin, release and end, in lines that the serving process appends, across its own restarts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from polyreme_api.clock import Clock

Kind = Literal["attempt", "released", "fault", "damage", "finished", "stopped", "now"]
FILE = "timeline.jsonl"
BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to an attempt."""

    at_s: float
    """When [s since the epoch]."""
    kind: Kind
    attempt: int
    text: str = ""
    """Scope of a new attempt, the injected fault, what data was found damaged, or the final reason."""
    steady_s: float = 0.0
    """The same on a clock that is never set; comparable with others of the same boot."""
    boot: str = ""
    """Boot of the machine to which ``steady_s`` belongs; empty: there is none."""


class Timeline:
    """The moments of one run, each once."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._path = directory / FILE
        self._clock = clock
        self._moments = read_timeline(directory)

    @property
    def moments(self) -> Sequence[Moment]:
        """All moments so far, in order."""
        return self._moments

    def has(self, kind: Kind, attempt: int) -> bool:
        """Tell whether a moment of this kind is known of the attempt."""
        return any(moment.kind == kind and moment.attempt == attempt for moment in self._moments)

    def add(self, moment: Moment) -> None:
        """Append a moment; a second one of the same kind and attempt is dropped, except for faults and damage."""
        if moment.kind not in {"fault", "damage"} and self.has(moment.kind, moment.attempt):
            return
        moment = self._timed(moment)
        self._moments.append(moment)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dataclasses.asdict(moment)) + "\n")

    def now(self) -> Moment:
        """Return the present as a moment, which is not kept."""
        return self._timed(Moment(at_s=self._clock.now_s(), kind="now", attempt=0))

    def _timed(self, moment: Moment) -> Moment:
        return dataclasses.replace(moment, steady_s=self._clock.steady_s(), boot=_boot())


def read_timeline(directory: Path) -> list[Moment]:
    """Read the moments of a run; a torn or damaged line is none."""
    try:
        lines = (directory / FILE).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [moment for line in lines if line.endswith("\n") and (moment := _parsed(line)) is not None]


def _parsed(line: str) -> Moment | None:
    """Read one line; a damaged one costs its moment, not the report."""
    try:
        return Moment(**json.loads(line))
    except (ValueError, TypeError):
        return None


@functools.cache
def _boot() -> str:
    """Name the boot of this machine; without a name steady clocks of two processes are not compared."""
    try:
        return BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""
