"""Live view of a run: a table that renews itself on a terminal, plain lines everywhere else.

Everything goes to standard error: standard output is for data. Nothing is animated off a terminal, and ``NO_COLOR`` is
respected (rich does).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.views.formatting import NOTHING, duration, in_words, rate, share, shortened
from polyreme.views.live_screen import LiveScreen

LINE_EVERY_S = 5.0
"""Least time between two plain lines that say nothing new but the step."""
EVENTS_SHOWN = 5
STAGES_SHOWN = 8
CHARACTERS_MAX = 400
"""Longest sentence or event that is shown."""
STAGE_CHARACTERS_MAX = 24
"""Longest name of a stage in the table; a longer one ends in an ellipsis."""
BAR_WIDTH_MAX = 40
BAR_WIDTH_MIN = 5
GAP = 2
"""Columns between two figures."""
LOSS_FIXED_BELOW = 1e5
"""Losses from here on are written with an exponent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """Progress of one processing stage of the data."""

    name: str
    done: int
    total: int | None = None
    """None: not known yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment; None where there is nothing to say yet."""

    job: str
    sentence: str
    """State in one sentence, with what it waits for; without figures that change at every step."""
    phase: str = ""
    """Phase of the ranks, as ``Training``."""
    attempt: int = 0
    step: int = 0
    steps: int = 0
    training_stage: str = ""
    """Stage of training; empty where the job names none."""
    loss: float | None = None
    held_out_loss: float | None = None
    """The newest."""
    objective: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What the objective measures."""
    tokens_per_second: float | None = None
    goodput: float | None = None
    left_s: float | None = None
    """Time to go."""
    ready: int = 0
    replicas: int = 0
    checkpoint_step: int | None = None
    """Step of the newest durable checkpoint."""
    stages: Sequence[StageView] = ()
    events: Sequence[str] = ()
    """Newest last."""


class LiveView(LiveScreen):
    """Shows a run: ``with LiveView() as live: live.show(view, now_s=clock.steady_s())``."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._said: tuple[object, ...] | None = None
        self._said_at_s = -math.inf
        self._events_said: Sequence[str] = ()

    def show(self, view: RunView, *, now_s: float) -> None:
        """Show a run as it is.

        Args:
            view: The run.
            now_s: Time on a steady clock, by which plain lines are spaced.
        """
        if self.is_live:
            self.draw(render_run(view))
        else:
            self._say(view, now_s=now_s)

    def note(self, words: str) -> None:
        """Say something once, above the table."""
        self.console.print(_plain(words), highlight=False, soft_wrap=True)

    def _say(self, view: RunView, *, now_s: float) -> None:
        for event in new_events(self._events_said, view.events):
            self.note(f"event: {event}")
        self._events_said = tuple(view.events)
        state = (view.sentence, view.attempt, view.ready, view.replicas, view.checkpoint_step)
        progress = (view.step, *((stage.name, stage.done) for stage in view.stages))
        is_new_state = self._said is None or self._said[0] != state
        moved = self._said is None or self._said[1] != progress
        if is_new_state or (moved and now_s - self._said_at_s >= LINE_EVERY_S):
            self.note(plain_line(view))
            self._said, self._said_at_s = (state, progress), now_s


def render_run(view: RunView) -> RenderableType:
    """Return the table: the sentence, the figures, a bar, the data's stages while there are any, the newest events."""
    head = Text.assemble((view.job, "bold"), "  ", _plain(view.sentence), no_wrap=False)
    parts: list[RenderableType] = [head, _Figures(view)]
    if view.steps:
        parts.append(_Progress(view.step, view.steps))
    if view.stages and view.step < max(view.steps, 1):
        parts.append(_Stages(view.stages))
    parts += [Text.assemble(("  · ", "dim"), (_plain(event).plain, "dim")) for event in view.events[-EVENTS_SHOWN:]]
    return Group(*parts)


def plain_line(view: RunView) -> str:
    """Return the run as one line, for logs."""
    parts = [view.job, view.sentence]
    if view.attempt:
        parts.append(f"attempt {view.attempt}")
    if view.replicas:
        parts.append(f"workers {view.ready}/{view.replicas}")
    if view.step:
        parts.append(f"step {view.step}/{view.steps}")
        parts += [f"stage {view.training_stage}"] if view.training_stage else []
        parts += [f"loss {_loss(view.loss)}"] if view.loss is not None else []
        parts += [f"held out {_loss(view.held_out_loss)}"] if view.held_out_loss is not None else []
        parts += [f"{in_words(name)} {_loss(value)}" for name, value in view.objective.items()]
        parts += [rate(view.tokens_per_second)] if view.tokens_per_second is not None else []
        parts += [f"{duration(view.left_s)} to go"] if view.left_s is not None else []
    else:
        parts += [f"{stage.name} {_count(stage)}" for stage in view.stages[:STAGES_SHOWN]]
    if view.checkpoint_step is not None:
        parts.append(f"checkpoint {view.checkpoint_step}")
    return " | ".join(parts)


def new_events(said: Sequence[str], events: Sequence[str]) -> list[str]:
    """Return the events that were not said: those after the longest end of ``said`` that ``events`` begins with."""
    for start in range(len(said)):
        if list(said[start:]) == list(events[: len(said) - start]):
            return list(events[len(said) - start :])
    return list(events)


class _Figures:
    """Named figures in as many rows as the terminal's width needs: no value is ever cut or broken."""

    def __init__(self, view: RunView) -> None:
        self._where = [
            _Cell("attempt", str(view.attempt) if view.attempt else NOTHING),
            _Cell("phase", view.phase or NOTHING, 14),
            _Cell("workers", f"{view.ready}/{view.replicas}" if view.replicas else NOTHING),
            _Cell("step", f"{view.step}/{view.steps}" if view.steps else NOTHING, 2 * len(str(view.steps)) + 1),
            *([_Cell("stage", shortened(view.training_stage, STAGE_CHARACTERS_MAX))] if view.training_stage else []),
            _Cell("checkpoint", NOTHING if view.checkpoint_step is None else str(view.checkpoint_step)),
        ]
        self._how = [
            _Cell("loss", _loss(view.loss), 6),
            *([_Cell("held out", _loss(view.held_out_loss))] if view.held_out_loss is not None else []),
            *(_Cell(in_words(name), _loss(value)) for name, value in view.objective.items()),
            _Cell("throughput", rate(view.tokens_per_second), 12),
            _Cell("goodput", share(view.goodput)),
            _Cell("to go", duration(view.left_s), 11),
        ]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Put all figures into one row, or place before pace, each in as few rows as it needs."""
        rows = _rows([*self._where, *self._how], options.max_width)
        if len(rows) > 1:
            rows = [*_rows(self._where, options.max_width), *_rows(self._how, options.max_width)]
        for row in rows:
            table = Table(box=None, padding=(0, GAP, 0, 0), show_edge=False, header_style="dim")
            for cell in row:
                table.add_column(cell.name, min_width=cell.width, no_wrap=True)
            table.add_row(*(Text(cell.value, no_wrap=True) for cell in row))
            yield table


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    name: str
    value: str
    width_min: int = 0
    """Width that the value may grow to, so that rows keep their layout while a run proceeds."""

    @property
    def width(self) -> int:
        return max(len(self.name), len(self.value), self.width_min)


def _rows(cells: Sequence[_Cell], width: int) -> list[list[_Cell]]:
    """Fill rows from left to right; each holds at least one cell."""
    rows: list[list[_Cell]] = [[]]
    for cell in cells:
        if rows[-1] and sum(other.width + GAP for other in rows[-1]) + cell.width > width:
            rows.append([])
        rows[-1].append(cell)
    return rows


class _Progress:
    """A bar over the steps, and the share that is done."""

    def __init__(self, done: int, total: int) -> None:
        self._done = done
        self._total = total

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar as long as the line allows."""
        share_done = f" {math.floor(self._done / self._total * 100)} %"
        row = Table.grid()
        width = min(BAR_WIDTH_MAX, options.max_width - len(share_done))
        row.add_row(_bar(self._done, self._total, width=width), Text(share_done))
        yield row


class _Stages:
    """Progress of the data's stages, one line each."""

    def __init__(self, stages: Sequence[StageView]) -> None:
        self._stages = stages[:STAGES_SHOWN]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Draw bars in the room that names and counts leave."""
        names = [shortened(stage.name, STAGE_CHARACTERS_MAX) for stage in self._stages]
        counts = [_count(stage) for stage in self._stages]
        room = options.max_width - max(map(len, names)) - max(map(len, counts)) - 2 * GAP
        grid = Table.grid(padding=(0, GAP, 0, 0))
        for stage, name, count in zip(self._stages, names, counts, strict=True):
            bar: RenderableType = Text("")
            if stage.total and room >= BAR_WIDTH_MIN:
                bar = _bar(stage.done, stage.total, width=min(BAR_WIDTH_MAX // 2, room))
            grid.add_row(Text(name, style="dim"), bar, Text(count))
        yield grid


def _bar(done: int, total: int, *, width: int) -> ProgressBar:
    return ProgressBar(total=total, completed=done, width=width, complete_style="cyan", finished_style="green")


def _count(stage: StageView) -> str:
    return f"{stage.done:,}" if stage.total is None else f"{stage.done:,}/{stage.total:,}"


def _loss(loss: float | None) -> str:
    if loss is None:
        return NOTHING
    return f"{loss:.3e}" if abs(loss) >= LOSS_FIXED_BELOW else f"{loss:.4f}"


def _plain(words: str) -> Text:
    """Take text as it is: no markup, one line, no control characters."""
    line = " ".join(words[:CHARACTERS_MAX].split())
    return Text("".join(character if character.isprintable() else "\ufffd" for character in line))
