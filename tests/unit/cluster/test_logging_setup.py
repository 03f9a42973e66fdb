"""What a log line says, and what it never says."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from polyreme_api.redaction import HIDDEN
from polyreme_cluster.logging_setup import LogFormat, set_up


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream that takes the whole log, and the root logger restored after the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_that_says_what_it_is_about(stream: io.StringIO) -> None:
    set_up(LogFormat.JSON, stream=stream)
    about = {"job": "default/x", "attempt": 2, "step": 7}
    logging.getLogger("polyreme_operator.controller").info("pass of %s", "u1", extra=about)
    logging.getLogger("polyreme_operator.controller").warning("outside\nof a pass")
    first, second = lines(stream)
    assert first["message"] == "pass of u1"
    assert (first["level"], first["logger"]) == ("info", "polyreme_operator.controller")
    assert (first["job"], first["attempt"], first["step"]) == ("default/x", 2, 7)
    assert first["ts"].endswith("Z")
    assert second["message"] == "outside\nof a pass"
    assert "job" not in second


def test_an_exception_is_part_of_its_line(stream: io.StringIO) -> None:
    set_up(LogFormat.JSON, stream=stream)
    try:
        raise ValueError("seen 3, rule 4")
    except ValueError:
        logging.getLogger("x").exception("it broke")
    (line,) = lines(stream)
    assert "ValueError: seen 3, rule 4" in line["exception"]


def test_text_is_one_line_whatever_the_message_holds(stream: io.StringIO) -> None:
    set_up(LogFormat.TEXT, stream=stream)
    logging.getLogger("x").info("one\ntwo", extra={"job": "default/x"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("INFO    x: one\\ntwo job=default/x")


def test_fields_named_like_secrets_are_hidden_and_others_stay(stream: io.StringIO) -> None:
    set_up(LogFormat.JSON, stream=stream)
    extra = {"run_token": "abc", "headers": {"Authorization": "abc", "accept": "text"}, "tokens_per_second": 9}
    logging.getLogger("x").info("call", extra=extra)
    (line,) = lines(stream)
    assert line["run_token"] == HIDDEN
    assert line["headers"] == {"Authorization": HIDDEN, "accept": "text"}
    assert line["tokens_per_second"] == 9
