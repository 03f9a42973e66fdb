"""``polyreme runs logs``: lines of ranks from the files of a run's pods, followed as they grow, or as stored."""

import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from polyreme.main import invoke
from polyreme.run_files import logs as run_logs
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import last_error
from polyreme_api.exit_codes import ExitCode
from polyreme_api.rank_logs import RankAttempt
from polyreme_launcher.log_files import LogFile
from tests.unit.cli.test_cli_housekeeping import MANIFEST


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("POLYREME_HOME", str(tmp_path))
    found = Home.locate().run("default", "kept")
    for pod in ("kept-u-0-0", "kept-u-1-0"):
        (found.pods / pod).mkdir(parents=True)
    found.job_file.write_text(yaml.safe_dump(MANIFEST))
    serve(found, served=True)
    return found


def serve(run: RunDirectory, *, served: bool) -> None:
    host = {"pid": os.getpid(), "processStartedAt": psutil.Process().create_time()} if served else {}
    run.identity_file.write_text(json.dumps({"host": host}))


def path_of(run: RunDirectory, rank: int, attempt: int) -> Path:
    return run.pods / f"kept-u-{rank // 2}-0" / RankAttempt(attempt, rank).file_name


def write(run: RunDirectory, rank: int, attempt: int, data: bytes) -> None:
    with path_of(run, rank, attempt).open("ab") as file:
        file.write(data)


def followed(run: RunDirectory, *changes: Callable[[], object], **asked: int | None) -> list[str]:
    """What is printed while things change between two looks; after the last of them the run ends."""
    taken: list[str] = []
    left = iter((*changes, lambda: serve(run, served=False)))

    def sleep(_: float) -> None:
        next(left)()

    run_logs.follow(run, taken.append, **{"rank": None, "attempt": None, "tail": 2} | asked, sleep=sleep)  # type: ignore[arg-type]
    return taken


def test_all_ranks_are_followed_over_attempts_each_line_once_until_the_run_ends(run: RunDirectory) -> None:
    write(run, 0, 1, b"".join(b"old %d\n" % number for number in range(5)))
    write(run, 3, 1, b"begun, ")

    rank_0 = ["old 3", "old 4", "new"]
    lines = followed(
        run,
        lambda: write(run, 3, 1, b"ended\nand "),
        lambda: write(run, 0, 1, b"new\n"),
        # The next attempt, which is shown whole.
        lambda: write(run, 0, 2, b"".join(b"again %d\n" % number for number in range(5))),
        lambda: write(run, 3, 1, b"no end"),
    )
    assert [line for line in lines if "attempt 2" in line] == [f"[rank 0 attempt 2] again {n}" for n in range(5)]
    assert [line for line in lines if "rank 0 attempt 1" in line] == [f"[rank 0 attempt 1] {text}" for text in rank_0]
    assert [line for line in lines if "rank 3" in line] == [
        f"[rank 3 attempt 1] {text}" for text in ("begun, ended", "and no end")
    ]
    serve(run, served=True)
    assert followed(run, rank=0, attempt=2) == ["[rank 0 attempt 2] again 3", "[rank 0 attempt 2] again 4"]


def test_a_file_that_is_set_aside_while_it_is_followed_loses_no_line(run: RunDirectory) -> None:
    log = LogFile(path_of(run, 1, 1), part_bytes_max=200)
    numbers = itertools.count()

    def lines(count: int) -> None:
        for number in itertools.islice(numbers, count):
            log.write(b"line %04d\n" % number)

    lines(35)
    taken = followed(run, *(functools.partial(lines, count) for count in (1, 7, 0, 19, 20, 30, 3)), tail=100)
    log.close()
    shown = [int(line.rpartition(" ")[2]) for line in taken]
    # More than both parts hold was written before: the first ones are gone.
    assert shown == list(range(shown[0], 115))
    assert shown[0] <= 20


def test_lines_are_shown_by_file_without_what_would_disturb_a_terminal(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 0, 1, b"\x1b[31mred\x1b[0m\n 1%\r 2%\rdone\npassword=hunter22\n")
    write(run, 1, 12, b"2026-11-26 10:00:00 ERROR the cause\nlast\n")
    assert invoke(["runs", "logs", "kept", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "==> pods/kept-u-0-0/rank-0.a1.log <==\nred\ndone\npassword=***\n"
    assert last_error(run, 12) == "the cause"
    assert last_error(run, 1) is None
    assert invoke(["runs", "logs", "kept", "-f", "--steps"]) == ExitCode.USAGE


def test_what_has_no_file_any_more_is_shown_as_stored_and_what_is_nowhere_is_an_error(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 2, 3, b"a line\n")
    for rank in (0, 1):
        path = run.checkpoints / RankAttempt(1, rank).stored_key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"stored {rank}\n")
    assert invoke(["runs", "logs", "kept", "--attempt", "1", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "==> logs/a000001/rank-00001.log <==\nstored 1\n"
    assert invoke(["runs", "logs", "kept", "--rank", "7"]) == ExitCode.NOT_FOUND
    said = capsys.readouterr().err
    assert "run 'kept' has no such log: rank 7, attempt None; ranks 0 to 2 have lines in attempts 3 to 3" in said
