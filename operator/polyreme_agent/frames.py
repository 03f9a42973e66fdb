"""Frames between reader and reporter: one line of JSON each, over a Unix socket that both containers share.

The reader has the host and no token, the reporter has the token and nothing of the host. So each side takes the
other's frames for foreign input: bounded, and strictly of this form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from polyreme_agent.ledger import Condition
from polyreme_api.node_report import CONDITION_AGENT, CONDITIONS, MESSAGE_CHARACTERS_MAX

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 65_536
REASON_CHARACTERS_MAX: Final = 63
TYPES: Final = frozenset({CONDITION_AGENT, *CONDITIONS})
_STATUSES: Final = frozenset({"True", "False", "Unknown"})


class Lines:
    """Splits what a socket gives into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are whole.

        Raises:
            ValueError: If a frame is longer than ``FRAME_BYTES_MAX``.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        longest = max(map(len, (*whole, self._rest)))
        if longest > FRAME_BYTES_MAX:
            raise ValueError(f"a frame has {longest} bytes or more, at most {FRAME_BYTES_MAX} are read")
        return whole


def report_frame(conditions: Sequence[Condition]) -> bytes:
    """Write what the reader reports: all conditions, as they are now."""
    body = [{"type": c.type, "status": c.status, "reason": c.reason, "message": c.message} for c in conditions]
    return _frame({"version": VERSION, "conditions": body})


def read_report(line: bytes) -> tuple[Condition, ...]:
    """Read what the reader reports.

    Raises:
        ValueError: If it is not of this form, naming why.
    """
    body = _body(line).get("conditions")
    if not isinstance(body, list) or len(body) > len(TYPES):
        raise ValueError(f"a report has conditions, at most {len(TYPES)}")
    conditions = tuple(_condition(each) for each in body)
    if len({condition.type for condition in conditions}) != len(conditions):
        raise ValueError("a report has each condition once")
    return conditions


def known_frame(messages: Iterable[str]) -> bytes:
    """Write what the reporter knows of the node's conditions from before."""
    return _frame({"version": VERSION, "known": [text[:MESSAGE_CHARACTERS_MAX] for text in messages][: len(TYPES)]})


def read_known(line: bytes) -> tuple[str, ...]:
    """Read what the reporter knows.

    Raises:
        ValueError: If it is not of this form.
    """
    known = _body(line).get("known")
    if not isinstance(known, list) or len(known) > len(TYPES) or not all(isinstance(each, str) for each in known):
        raise ValueError(f"known is a list of at most {len(TYPES)} texts")
    return tuple(known)


def _frame(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _body(line: bytes) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("a frame is no JSON") from error
    if not isinstance(body, dict) or body.get("version") != VERSION:
        raise ValueError(f"a frame is an object of version {VERSION}")
    return body


def _condition(body: object) -> Condition:
    if not isinstance(body, dict) or set(body) != {"type", "status", "reason", "message"}:
        raise ValueError("a condition has type, status, reason and message")
    kind, status, reason, message = (body[key] for key in ("type", "status", "reason", "message"))
    if kind not in TYPES or status not in _STATUSES:
        raise ValueError(f"a condition of the agent has one of its types and a status, not {str(kind)[:64]!r}")
    if not isinstance(reason, str) or not (
        reason.isascii() and reason.isalnum() and len(reason) <= REASON_CHARACTERS_MAX
    ):
        raise ValueError(f"a reason is letters and digits, at most {REASON_CHARACTERS_MAX}")
    if not isinstance(message, str) or len(message) > MESSAGE_CHARACTERS_MAX:
        raise ValueError(f"a message is a text of at most {MESSAGE_CHARACTERS_MAX} characters")
    return Condition(type=str(kind), status=str(status), reason=reason, message=message)
