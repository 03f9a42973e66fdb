"""The live table, on a terminal and off it."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence

import pytest
from rich.console import Console

from polyreme.views.live_table import LINE_EVERY_S, LiveView, RunView, StageView, new_events, plain_line, render_run

VIEW = RunView(
    job="default/quickstart",
    sentence="Training",
    phase="Training",
    attempt=2,
    step=237,
    steps=800,
    loss=0.43214,
    tokens_per_second=7950.0,
    goodput=0.91,
    left_s=72.0,
    ready=2,
    replicas=2,
    checkpoint_step=200,
    stages=[StageView(name="decode", done=1200, total=1500), StageView(name="tokenize", done=300)],
    events=["started attempt 1", "rank 2 ended by SIGKILL"],
)


LONG = RunView(
    job="a-job-with-a-name-of-sixty-three-characters-as-kubernetes-allows",
    sentence="training; no new step for 30 s, a rank may be hanging",
    phase="WaitingForData",
    attempt=1000,
    step=123_456_789,
    steps=987_654_321,
    training_stage="cool-down-on-the-best-tenth-of-all-data",
    loss=123.4567,
    held_out_loss=1.23e30,
    tokens_per_second=123_456_789.0,
    goodput=0.9123,
    left_s=30.4 * 86_400,
    ready=14_999,
    replicas=15_000,
    checkpoint_step=123_456_000,
    stages=[StageView(name="tokenize-for-a-dataset-of-mine", done=1_234_567_890, total=9_876_543_210)],
)
LONG_VALUES = (
    "1000", "WaitingForData", "14999/15000", "123456789/987654321", "cool-down-on-the-best-t…", "123456000",
    "123.4567", "1.230e+30", "123,456,789 tok/s", "91.2 %", "30 d 09 h", "1,234,567,890/9,876,543,210", "12 %",
)  # fmt: skip
SHORT_VALUES = ("2", "Training", "2/2", "237/800", "200", "0.4321", "7,950 tok/s", "91 %", "1 min 12 s", "1,200/1,500")


def console(*, terminal: bool, environment: Mapping[str, str] | None = None) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    shown = Console(
        file=file, force_terminal=terminal, width=120, _environ=environment or {"TERM": "xterm-256color"}, record=True
    )
    return shown, file


def test_the_table_shows_the_runs_progress() -> None:
    shown, _ = console(terminal=True)
    shown.print(render_run(VIEW))
    text = shown.export_text()
    for words in (
        "default/quickstart", "Training", "2/2", "237/800", "0.4321", "7,950 tok/s", "91 %", "1 min 12 s", "200",
        "29 %", "decode", "1,200/1,500", "tokenize", "300", "rank 2 ended by SIGKILL",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(("view", "values"), [(VIEW, SHORT_VALUES), (LONG, LONG_VALUES)], ids=["short", "long"])
def test_every_figure_is_whole_at_every_width(width: int, view: RunView, values: Sequence[str]) -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=width, record=True)
    shown.print(render_run(view))
    lines = shown.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for value in values:
        assert [line for line in lines if value in line], value


def test_the_rows_stay_while_a_run_goes_on() -> None:
    """Every look at 80 columns has the same heads at the same place: a table that jumps can't be read."""
    heads = set()
    for view in (RunView(job="a", sentence="starting", attempt=1, steps=800, ready=2, replicas=2), VIEW):
        shown = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
        shown.print(render_run(view))
        heads.add(
            tuple(line.rstrip() for line in shown.export_text().splitlines() if line.startswith(("attempt", "loss")))
        )
    assert len(heads) == 1


def test_a_run_that_waits_shows_its_sentence_and_no_bar() -> None:
    shown, _ = console(terminal=True)
    shown.print(render_run(RunView(job="default/a", sentence="waiting for 2 pods: no node has 4 devices")))
    text = shown.export_text()
    assert "waiting for 2 pods: no node has 4 devices" in text
    assert "━" not in text


def test_a_finished_run_hides_the_stages_of_its_data() -> None:
    shown, _ = console(terminal=True)
    shown.print(render_run(dataclasses.replace(VIEW, step=800)))
    assert "decode" not in shown.export_text()


def test_square_brackets_and_escape_sequences_are_text() -> None:
    shown, file = console(terminal=True)
    shown.print(
        render_run(dataclasses.replace(VIEW, sentence="[bold red]x[/]\x1b[2Jy", events=["[link=a]b[/link]\x07"]))
    )
    assert "[bold red]x[/]" in file.getvalue()
    assert "[link=a]b[/link]" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()
    assert "\x07" not in file.getvalue()


def test_a_terminal_sees_the_table_renewed_in_place_and_the_last_state_stays() -> None:
    shown, file = console(terminal=True)
    with LiveView(shown) as live:
        live.show(VIEW, now_s=0.0)
        live.show(dataclasses.replace(VIEW, step=238), now_s=0.1)
    assert "\x1b[1A" in file.getvalue()
    assert "238/800" in file.getvalue().rpartition("\x1b[1A")[2]


def test_off_a_terminal_nothing_is_animated() -> None:
    shown, file = console(terminal=False)
    with LiveView(shown) as live:
        live.show(VIEW, now_s=0.0)
    assert "\x1b" not in file.getvalue()
    assert "━" not in file.getvalue()
    assert file.getvalue().splitlines() == [
        "event: started attempt 1",
        "event: rank 2 ended by SIGKILL",
        plain_line(VIEW),
    ]
    assert plain_line(VIEW) == (
        "default/quickstart | Training | attempt 2 | workers 2/2 | step 237/800 | loss 0.4321 | 7,950 tok/s"
        " | 1 min 12 s to go | checkpoint 200"
    )
    staged = dataclasses.replace(VIEW, training_stage="cool-down", held_out_loss=0.5)
    assert "step 237/800 | stage cool-down | loss 0.4321 | held out 0.5000 | " in plain_line(staged)
    shown.print(render_run(staged))
    assert "cool-down" in file.getvalue()


def test_a_dumb_terminal_is_none() -> None:
    shown, file = console(terminal=True, environment={"TERM": "dumb"})
    with LiveView(shown) as live:
        live.show(VIEW, now_s=0.0)
    assert "\x1b" not in file.getvalue()


def test_no_color_is_respected() -> None:
    shown, file = console(terminal=True, environment={"TERM": "xterm-256color", "NO_COLOR": "1"})
    shown.print(render_run(VIEW))
    assert not [code for code in ("\x1b[3", "\x1b[9", "\x1b[4") if code in file.getvalue()]


def test_off_a_terminal_steps_come_every_few_seconds_and_states_at_once() -> None:
    shown, file = console(terminal=False)
    with LiveView(shown) as live:
        for tick in range(100):
            live.show(dataclasses.replace(VIEW, step=tick, events=[]), now_s=tick * 0.1)
        live.show(dataclasses.replace(VIEW, step=99, sentence="restarting in place", events=[]), now_s=9.95)
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + int(9.9 // LINE_EVERY_S) + 1
    assert "restarting in place" in lines[-1]


def test_off_a_terminal_a_stalled_run_prints_its_state_once() -> None:
    shown, file = console(terminal=False)
    with LiveView(shown) as live:
        for tick in range(100):
            live.show(VIEW, now_s=float(tick))
    assert len(file.getvalue().splitlines()) == 3


def test_before_the_first_step_the_line_counts_the_data() -> None:
    line = plain_line(dataclasses.replace(VIEW, step=0, sentence="waiting for data"))
    assert "decode 1,200/1,500 | tokenize 300" in line


@pytest.mark.parametrize(
    ("said", "events", "new"),
    [
        ([], ["a", "b"], ["a", "b"]),
        (["a", "b"], ["a", "b"], []),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a"], ["a", "a"], ["a"]),
        (["a", "b"], ["x", "y"], ["x", "y"]),
        (["a", "b"], [], []),
    ],
)
def test_each_event_is_said_once(said: list[str], events: list[str], new: list[str]) -> None:
    assert new_events(said, events) == new


def test_standard_output_stays_the_callers() -> None:
    shown, _ = console(terminal=True)
    before = sys.stdout
    with LiveView(shown) as live:
        live.show(VIEW, now_s=0.0)
        assert sys.stdout is before


def test_without_a_console_it_speaks_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView() as live:
        live.show(VIEW, now_s=0.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 237/800" in captured.err


def test_a_note_is_printed_above_the_table() -> None:
    shown, file = console(terminal=True)
    with LiveView(shown) as live:
        live.show(VIEW, now_s=0.0)
        live.note("report: [x]/report.html")
    assert "report: [x]/report.html" in file.getvalue()
