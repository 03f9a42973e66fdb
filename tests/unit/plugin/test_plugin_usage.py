"""Sums of device time as `kubectl polyreme usage` shows them."""

import csv
import io
import json
from typing import Any

import pytest

from polyreme.plugin.main import invoke
from polyreme.plugin.reading import Sight
from polyreme.plugin.snapshot import Snapshot
from polyreme.plugin.target import Target
from polyreme.plugin.usage import By, usage_rows, usage_table
from polyreme_api.exit_codes import ExitCode
from polyreme_api.times import rfc3339
from tests.unit.plugin.plugin_scenes import NOW_S, job, runs, snapshot, text, waits

HOUR_MS = 3_600_000
TODAY, YESTERDAY = rfc3339(NOW_S)[:10], rfc3339(NOW_S - 86_400)[:10]


def cells(*entries: tuple[str, str, float]) -> list[dict[str, Any]]:
    return [{"what": what, "why": why, "deviceMilliseconds": int(hours * HOUR_MS)} for what, why, hours in entries]


def day(date: str, productive: float, held: float, queued: float) -> dict[str, Any]:
    parts = {"productive": productive, "held": held, "queued": queued}
    return {"day": date, **{f"{name}DeviceMilliseconds": int(hours * HOUR_MS) for name, hours in parts.items()}}


def scene() -> Snapshot:
    """One job that runs on two nodes, and one that waits again."""
    spent = cells(
        ("Productive", "", 60), ("Hang", "Hung", 12), ("Starting", "Starting", 8), ("Queued", "Starting", 20),
        ("Queued", "Suspend", 900),
    )  # fmt: skip
    settled = {"attempt": 1, "at": rfc3339(NOW_S), "cause": "Starting", "cells": cells(("Productive", "", 6))}
    days = [day(YESTERDAY, 50, 70, 20), day(TODAY, 10, 10, 0)]
    big = job(
        "big",
        queueName="a",
        status=runs("n0", "n0", "n1", accounting={"cells": spent, "days": days, "settled": settled}),
    )
    big["metadata"]["labels"] = {"team": "vision"}
    lost = {"cells": cells(("Recomputed", "NodeLost", 5), ("Queued", "NodeLost", 5)), "days": [day(TODAY, 0, 5, 5)]}
    return snapshot(big, job("small", queueName="b", status={**waits("ExceedsQuota"), "accounting": lost}))


def hours(seen: Snapshot, **options: Any) -> dict[str, tuple[float, float, float]]:
    return {
        row["key"]: tuple(row[f"{name}DeviceSeconds"] / 3_600 for name in ("productive", "held", "queued"))
        for row in (each.to_object() for each in usage_rows(seen, **options))
    }


def test_usage_is_drawn_by_queue_with_what_most_was_lost_to() -> None:
    assert text(usage_table(usage_rows(scene(), by=By.QUEUE), heading="queue")) == (
        "QUEUE   JOBS   PRODUCTIVE   HELD      QUEUED    GOODPUT   ETTR   MOST LOST TO\n"
        "a       1      60.00 h      80.00 h   20.00 h   75 %      60 %   Hang (Hung)\n"
        "b       1      0.00 h       5.00 h    5.00 h    0 %       0 %    Recomputed (NodeLost)\n"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"by": By.DAY}, {YESTERDAY: (50, 70, 20), TODAY: (10, 15, 5)}),
        ({"by": By.QUEUE, "since_s": NOW_S}, {"a": (10, 10, 0), "b": (0, 5, 5)}),
        ({"by": By.QUEUE, "label": "team"}, {"vision": (60, 80, 20), "(none)": (0, 5, 5)}),
        ({"by": By.NODE}, {"n0": (4, 4, 0), "n1": (2, 2, 0)}),
        ({"by": By.JOB, "since_s": NOW_S + 86_400}, {}),
    ],
    ids=["day", "since today", "label", "node", "since tomorrow"],
)
def test_usage_is_summed_by_what_is_asked_for(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert hours(scene(), **options) == expected


def test_uses_are_summed_over_jobs() -> None:
    found = {row.key: (row.jobs, sum(row.table.values()) // HOUR_MS) for row in usage_rows(scene(), by=By.USE)}
    assert found["Productive"] == (1, 60)
    assert found["Queued (Suspend)"] == (1, 900)
    assert found["Hang (Hung)"] == (1, 12)


def test_the_command_writes_the_same_sums_in_every_form_and_a_whole_head_without_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(seen: Snapshot, *options: str) -> tuple[str, str]:
        monkeypatch.setattr(Target, "run", lambda *_: Sight(seen))
        assert invoke(["usage", "-n", "team", *options]) == ExitCode.OK
        shown = capsys.readouterr()
        return shown.out, shown.err

    items = json.loads(printed(scene(), "--label", "team", "-o", "json")[0])["items"]
    assert [(row["key"], row["goodputRatio"]) for row in items] == [("vision", 0.75), ("(none)", 0)]
    table = printed(scene(), "--label", "team", "-o", "csv")[0]
    assert [(row["key"], row["heldDeviceSeconds"]) for row in csv.DictReader(io.StringIO(table))] == [
        ("vision", "288000.0"),
        ("(none)", "18000.0"),
    ]
    assert printed(scene(), "--label", "team")[0].split()[0] == "TEAM"
    assert printed(snapshot(), "-o", "csv")[0] == table.partition("\n")[0] + "\n"
    assert printed(snapshot()) == ("", "no device time is charged yet\n")
