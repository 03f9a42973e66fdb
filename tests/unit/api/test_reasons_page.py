"""The page of reasons names every word that a status may hold."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

from polyreme_operator.placement.topology import ProblemReason
from polyreme_operator.queueing.tree import QueueReason
from polyreme_operator.types.reasons import Cause, ConditionType, Reason

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"


@pytest.mark.parametrize("words", [ConditionType, Reason, Cause, QueueReason, ProblemReason])
def test_every_word_is_on_the_page(words: type[StrEnum]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [word.value for word in words if f"`{word.value}`" not in page] == []


def test_the_page_lists_pending_reasons_in_order_of_precedence() -> None:
    order = re.search(r"first in this order is\s+reported:\s+(.*?)\.\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert order is not None
    told = re.findall(r"`(\w+)`", order[1])
    ranked = [reason.value for reason in Reason]
    assert told == ranked[: ranked.index("Starting") + 1]
