"""Messages between leader and followers: one JSON object per line, bounded.

Leader to follower: ``Directive``, ``Check``, ``Release``, ``WriteStacks``, ``Finish``, ``Beat``. Follower to leader:
``Joined``, ``Checked``, ``Exited``, ``Leaving``, ``Beat``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeAlias

from polyreme_api.errors import InvalidConfigError

LINE_BYTES_MAX = 1 << 20
"""Longest line, including its end. A directive carries the job and its plan, some tens of KiB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The attempt that shall run: a follower ends older ranks and joins it."""

    attempt: int
    run: bool
    """Whether ranks shall run (``desired: Run``); else they shall stop."""
    checkpoint_requested: bool
    """Whether ranks shall checkpoint: before they stop, or, while they run, at the next step."""
    replacement: int
    """Replacement number of the pod that may fill the receiver's place."""
    job_json: str
    plan_json: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Every index has joined with its old ranks dead: fork the ranks of this attempt."""

    attempt: int
    master_address: str
    master_port: int
    resume_from: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check this worker's node before the attempt's ranks start; a newer serial number ends an older check."""

    attempt: int
    serial: int
    partners: tuple[int, ...]
    """The two workers between which an all-reduce is checked, in the order of their ranks; none: each worker alone."""
    address: str
    port: int
    """Where the pairs meet."""
    seconds: int
    """How long the check may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check has measured."""

    attempt: int
    serial: int
    report: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Nothing is left to do: end the ranks, if any still run, and exit with this code."""

    code: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The sender is alive. A follower adds the newest look at its ranks."""

    ranks: tuple[int, ...] = ()
    """Their states, as ``polyreme_api.rank_state`` writes them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteStacks:
    """Have every rank of an attempt write the stacks of its threads."""

    attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The sender's pod is being terminated: its ranks checkpoint and stop, and so do all others after the same step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """No rank of an older attempt lives on this index."""

    attempt: int
    index: int
    replacement: int
    launcher: str
    """Process of the sender: another process of the same place is another pod, or the pod started again."""
    forked: bool
    """Whether ranks of this attempt were started here: true for a launcher that reconnects after a lost connection."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A rank ended, by exit code or by signal."""

    attempt: int
    rank: int
    code: int | None
    signal: int | None
    message: str = ""
    """The rank's last message, if it ended by an error of its own."""


Message: TypeAlias = Directive | Check | Checked | Release | WriteStacks | Finish | Beat | Leaving | Joined | Exited

_TYPES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (Directive, Check, Checked, Release, WriteStacks, Finish, Beat, Leaving, Joined, Exited)
}
_VALUES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "tuple[int, ...]": (list,),
}


def encode(message: Message) -> bytes:
    """Write a message as one line.

    Raises:
        InvalidConfigError: If the line would be longer than ``LINE_BYTES_MAX``.
    """
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    line = json.dumps({"type": type(message).__name__, **fields}, separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_BYTES_MAX:
        raise InvalidConfigError(
            f"launcher message is too long: {type(message).__name__} of {len(line)} bytes, "
            f"expected at most {LINE_BYTES_MAX}",
            field="size of the job's spec",
        )
    return line


def decode(line: bytes) -> Message:
    """Read one line.

    Raises:
        InvalidConfigError: If it is no message, or one with a field missing, unknown or of another type.
    """
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InvalidConfigError(f"launcher message is not JSON: {len(line)} bytes") from error
    kind = _TYPES.get(str(data.pop("type", ""))) if isinstance(data, dict) else None
    if kind is None:
        raise InvalidConfigError(f"launcher message of unknown type, expected one of {', '.join(_TYPES)}")
    return kind(**_checked(kind, data))


def _checked(kind: type[Message], data: dict[str, Any]) -> dict[str, Any]:
    names = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if data.keys() != names.keys():
        odd = sorted(data.keys() ^ names.keys())
        raise InvalidConfigError(f"launcher message {kind.__name__} has other fields: {', '.join(odd)}")
    for name, annotation in names.items():
        value = data[name]
        # bool is an int in Python; on the wire it isn't.
        if not isinstance(value, _VALUES[annotation]) or (isinstance(value, bool) and annotation != "bool"):
            raise InvalidConfigError(f"launcher message {kind.__name__}.{name} is no {annotation}: {value!r}")
        if isinstance(value, list):
            if not all(type(item) is int for item in value):
                raise InvalidConfigError(f"launcher message {kind.__name__}.{name} is no {annotation}: {value!r}")
            data[name] = tuple(value)
    return data
