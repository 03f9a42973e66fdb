"""Port of the console: runs that it shows and acts on, of a home or of a cluster.

One contract suite (``tests/contract/test_run_sources.py``) says what an adapter must do, and runs against both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polyreme.report.comparison import ComparedRun
from polyreme_api.errors import NotFoundError

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
ALL_NAMESPACES = "*"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """Which run."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Write it as commands take it."""
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"

    @property
    def whole(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    @classmethod
    def read(cls, text: str, *, namespace: str = "default") -> RunName:
        """Read ``namespace/name``, or a name alone.

        Raises:
            NotFoundError: If that is no name of a run.
        """
        above, _, short = text.rpartition("/")
        above = above or namespace
        if not all(_NAME.fullmatch(part) for part in (above, short)):
            raise NotFoundError(f"no run {text[:128]!r}: names have letters, digits, dots and hyphens alone")
        return cls(namespace=above, name=short)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """What a list of runs shows."""

    namespace: str = ""
    """Empty: where the source looks by itself; ``*``: all that there are."""
    text: str = ""
    """Part of the name or namespace."""
    state: str = ""
    where: tuple[tuple[str, str], ...] = ()
    """Fields of the spec and their values."""
    sort: str = "changed"
    descending: bool = True
    offset: int = 0
    count: int = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in a list."""

    namespace: str
    name: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    held_out: float | None
    goodput: float | None
    attempt: int | None
    changed: float
    """When its state was last written [s since the epoch]."""
    message: str
    fields: Mapping[str, Any]
    """Of the spec, by name below spec."""

    @property
    def run(self) -> RunName:
        """Its name."""
        return RunName(namespace=self.namespace, name=self.name)


SORTED_BY = ("state", "step", "loss", "held_out", "goodput", "attempt", "changed", "name")
"""What a list can be sorted by, beside fields of the spec."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """A page of runs."""

    rows: Sequence[RunRow]
    total: int
    """Runs that the query finds, on all pages."""
    states: Mapping[str, int]
    """How many runs are in each state, without the query's filters but the namespace."""
    notes: Sequence[str] = ()
    """Sentences on runs that may be there and are not shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Numbers of a run over its steps, thinned out."""

    step: Sequence[float] = ()
    tokens: Sequence[float] = ()
    """Trained up to each step."""
    hours: Sequence[float] = ()
    """Time of the retained steps up to each step."""
    values: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """By measure."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """A run in a comparison."""

    run: RunName
    compared: ComparedRun
    curve: Curve
    said: str = ""
    """Why there is no curve, where that can be changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number that an action asks for; the form's field is called ``number``."""

    title: str
    value: int
    least: int
    most: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Something that a person may do to a run now."""

    name: str
    """In its address."""
    title: str
    says: str
    """What it does, in one sentence."""
    command: str
    """What does the same in a terminal."""
    harmful: bool = False
    number: Number | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """The last lines of one of the logs of a run."""

    names: Sequence[str]
    """Logs that there are; the first is shown unless another is asked for."""
    chosen: str
    lines: Sequence[str]
    place: str
    """Where they come from."""
    command: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check of a job, before it is submitted."""

    good: bool
    said: str
    """Why it is refused."""
    notes: Sequence[str] = ()
    plan: str = ""


class RunSource(Protocol):
    """Runs of one place, as one user may see and change them.

    Every method may raise a PolyremeError whose sentence a page shows.
    """

    @property
    def poll_s(self) -> float:
        """How often a live page looks again [s]."""
        ...

    @property
    def namespace(self) -> str:
        """Where the source looks by itself; empty: everywhere."""
        ...

    @property
    def states(self) -> Sequence[str]:
        """States that a run may have."""
        ...

    @property
    def first_step(self) -> str:
        """What to type where there is no run yet."""
        ...

    async def namespaces(self) -> Sequence[str]:
        """Return those that a person may choose from; none where they are not known."""
        ...

    async def find(self, query: RunQuery) -> RunList:
        """Return a page of runs."""
        ...

    async def manifest(self, run: RunName) -> Mapping[str, Any]:
        """Return the job of a run, as it was submitted.

        Raises:
            NotFoundError: If there is none.
        """
        ...

    async def overview(self, run: RunName) -> str:
        """Return what is known of a run, as HTML with one ``h1``.

        Raises:
            NotFoundError: If there is no such run.
        """
        ...

    def pages(self, run: RunName) -> Sequence[tuple[str, str]]:
        """Return title and path of further pages of a run."""
        ...

    async def compared(self, run: RunName) -> RunCurves:
        """Return what a comparison shows of a run; curves are empty where the source has no steps.

        Raises:
            NotFoundError: If there is no such run.
        """
        ...

    def compare_command(self, runs: Sequence[RunName]) -> str:
        """Return what compares them in a terminal; empty: nothing does."""
        ...

    async def logs(self, run: RunName, name: str) -> LogPart:
        """Return the last lines of a log; an empty name: of the first one.

        Raises:
            NotFoundError: If there is no such run.
            RefusedError: If it has no such log, or no lines yet.
        """
        ...

    async def offers(self, run: RunName) -> Sequence[Offer]:
        """Return the actions on a run that exists."""
        ...

    async def act(self, run: RunName, action: str, number: int | None) -> None:
        """Do something to a run.

        Raises:
            NotFoundError: If there is no such run or action.
            RefusedError: If its state does not allow it now.
        """
        ...

    async def check(self, manifest: Mapping[str, Any]) -> Verdict:
        """Check a job, and submit nothing."""
        ...

    async def submit(self, manifest: Mapping[str, Any]) -> RunName:
        """Submit a job.

        Raises:
            InvalidConfigError: If it is wrong.
            RefusedError: If there is one of that name, or the user may not.
        """
        ...

    def submit_command(self, settings: Sequence[str]) -> str:
        """Return what submits ``job.yaml`` with these settings in a terminal."""
        ...
