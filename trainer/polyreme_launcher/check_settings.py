"""Settings of one process of a check; without torch, since the launcher writes them."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What one process checks."""

    index: int
    local_rank: int
    devices: int
    partners: tuple[int, ...]
    """The pair of workers that sum together; none: this worker alone."""
    address: str
    port: int
    serial: int
    seconds: int
    folder: str
    """Where the disk is checked."""
    serves: bool = False
    """Whether this process is the place where pairs meet."""

    def render(self) -> str:
        """Write them for the environment."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> CheckSettings:
        """Read what ``render`` wrote."""
        data = json.loads(text)
        return cls(**{**data, "partners": tuple(data["partners"])})
