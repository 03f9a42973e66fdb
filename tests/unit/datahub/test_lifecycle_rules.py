"""Decisions of a dataset's lifecycle, apart from any database: verdicts of a collection, expressions, splits."""

from __future__ import annotations

import pytest

from polyreme_datahub.errors import PredicateInvalidError, SourceInvalidError
from polyreme_datahub.registry import blobs
from polyreme_datahub.registry.blobs import BlobRow, Verdict
from polyreme_datahub.registry.derived import split_takers
from polyreme_datahub.registry.predicate import parse_predicate

DAY_S = 86400.0
WEEK_S = 7 * DAY_S
COLUMNS = ["width", "height", "lang", "blurred"]
ROW = {"width": 640, "height": 480, "lang": "en", "blurred": None}


@pytest.mark.parametrize(
    ("state", "marked", "touched_s", "condemned_s", "verdict"),
    [
        (blobs.LIVE, 7, 0.0, 0.0, Verdict.KEEP),
        (blobs.LIVE, 6, 0.0, 0.0, Verdict.CONDEMN),
        (blobs.LIVE, 6, WEEK_S - blobs.TOUCH_EVERY_S, 0.0, Verdict.KEEP),
        (blobs.CONDEMNED, 6, 0.0, DAY_S, Verdict.DELETE),
        (blobs.CONDEMNED, 6, 0.0, DAY_S + 1, Verdict.KEEP),
        (blobs.CONDEMNED, 7, 0.0, 0.0, Verdict.REVIVE),
        (blobs.DELETING, 7, WEEK_S, 0.0, Verdict.FINISH),
    ],
)
def test_each_state_has_its_verdict(
    state: int, marked: int, touched_s: float, condemned_s: float, verdict: Verdict
) -> None:
    blob = BlobRow(digest="d", size=1, state=state, touched_s=touched_s, condemned_s=condemned_s, marked=marked)
    assert blobs.judge(blob, collection=7, started_s=WEEK_S, now_s=8 * DAY_S, grace_s=WEEK_S) is verdict


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("width >= 640 and height < 481", True),
        ("512 <= width <= 600", False),
        ('lang in ["en", "de"] and not lang == "de"', True),
        ('lang not in ("fr",) or width < -1', True),
        ("blurred == None and not blurred", True),
        ("blurred < 1 or blurred >= 1", False),
        ("width > height", True),
        ("True and not False", True),
    ],
)
def test_an_expression_chooses_samples(text: str, wanted: bool) -> None:
    assert parse_predicate(text, COLUMNS)(ROW) is wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("__import__('os').system('x')", "has"),
        ("width.__class__ == 1", "has 'width.__class__'"),
        ("(lambda: 1)() == 1", "has"),
        ("width ** 9999999 > 1", "has 'width ** 9999999'"),
        ("[x for x in width] == 1", "has"),
        ("f'{width}' == 1", "has"),
        ("price > 1", "expected one of blurred, height, lang, width"),
        ("width is None", "uses `is`"),
        ("lang in width", "expected a list after `in`"),
        ("width >", "is no expression"),
        ("", "is no expression"),
        ("width := 1", "is no expression"),
        ("1" * 20_000, "expected at most 10000"),
        ("not " * 60 + "width", "nested deeper than 50"),
        ("(" * 5000, ""),
        ("width < lang", "have no order"),
    ],
)
def test_whatever_else_an_expression_holds_is_refused(text: str, why: str) -> None:
    with pytest.raises(PredicateInvalidError) as refused:
        parse_predicate(text, COLUMNS)(ROW)
    assert why in str(refused.value)


def test_splits_have_positive_shares_and_together_take_every_group_once() -> None:
    takers = split_takers({"a": 1, "b": 0.0001, "c": 3}, lambda row: row["group"])
    for group in range(2000):
        assert sum(takes({"group": group}) for takes in takers.values()) == 1
    with pytest.raises(SourceInvalidError, match="positive shares"):
        split_takers({"a": 1, "b": 0}, lambda row: row)
