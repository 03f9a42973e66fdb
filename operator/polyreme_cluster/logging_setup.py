"""Logs: one JSON object a line, or text for people; with what they are about as fields, never with a secret."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TextIO

from polyreme_api.redaction import HIDDEN, hide
from polyreme_api.times import rfc3339

MESSAGE_CHARACTERS_MAX = 8_192
TRACE_CHARACTERS_MAX = 32_768
_SECRET_NAME = re.compile(r"(?:token|secret|password|passwd|authorization|api[-_]?key|credentials?)$", re.IGNORECASE)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NOISY = ("aiohttp.access", "asyncio", "urllib3", "kubernetes.client.rest")


class LogFormat(StrEnum):
    """Form of the log: the operator's ``--log-format``."""

    JSON = "json"
    TEXT = "text"


def set_up(format_: LogFormat, *, level: int = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Send every log to one stream in one form; earlier handlers of the root logger go.

    Returns:
        The handler, which is the root logger's only one.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for earlier in list(root.handlers):
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    return handler


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, then what the line is about."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        line: dict[str, Any] = {
            "ts": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(hide(record.getMessage()), MESSAGE_CHARACTERS_MAX),
        }
        for name, value in fields_of(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = _cut(hide(self.formatException(record.exc_info)), TRACE_CHARACTERS_MAX)
        return json.dumps(line, ensure_ascii=False, default=_plain)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, logger, message, then ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line, and the lines of an exception."""
        about = "".join(f" {name}={_plain(value)}" for name, value in fields_of(record).items())
        message = _cut(hide(record.getMessage()), MESSAGE_CHARACTERS_MAX).replace("\n", "\\n")
        line = f"{rfc3339(record.created)} {record.levelname:<7} {record.name}: {message}{about}"
        if record.exc_info:
            line += "\n" + _cut(hide(self.formatException(record.exc_info)), TRACE_CHARACTERS_MAX)
        return line


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return what a line is about, its ``extra``; secrets hidden."""
    return {
        name: _shown(name, value)
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }


def _shown(name: str, value: object) -> object:
    if _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): _shown(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(name, inner) for inner in value]
    return hide(value) if isinstance(value, str) else value


def _plain(value: object) -> str:
    return hide(str(value))


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"
