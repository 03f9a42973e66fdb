"""Generated traces of gangs, which hang or do not: what each rank's page and process show, and when steps end.

A trace is a list of spans, each with its length, what ranks do in it and how often they advance. The generator knows
nothing of the detector but the states that ranks can show; the detector can't import it, since it lies outside the
sources.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from polyreme_api.rank_state import RankActivity, RankState, RankWait

HANG_SHARE = 0.6
"""Traces that end in a hang; the others end well."""
RECORDER_OFF = 0.02
"""Ranks of one launcher have no page, so that they are not seen to advance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in which ranks do one thing."""

    seconds: float
    activity: RankActivity
    every_s: float | None
    """How often each rank advances; None: none does."""
    shows: str = "work"
    """What ranks show meanwhile; see ``_shown``."""
    culprit: int = -1
    """Rank that holds up the others, if one does."""
    step_s: float | None = None
    """Time of a step, if steps end in it."""
    seen: bool = True
    """Whether the launchers are seen meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A run, or a part of one."""

    seed: int
    ranks: int
    pp: int
    spans: tuple[Span, ...]
    hang: Span | None
    """The last span, if it never ends."""
    recorder_off: bool

    @property
    def hangs_at_s(self) -> float:
        """When it begins to hang; infinity if it does not."""
        ended_s = sum(span.seconds for span in self.spans)
        return float("inf") if self.hang is None else ended_s

    def events(self) -> Iterator[tuple[float, RankActivity]]:
        """Yield when steps end and other activities begin, as a trainer would report them."""
        at_s = 0.0
        since_step_s = 0.0
        for span in self.spans:
            if span.step_s is None:
                if span.activity is not RankActivity.STEP:
                    yield at_s, span.activity
                at_s += span.seconds
                continue
            end_s = at_s + span.seconds
            at_s -= since_step_s
            while at_s + span.step_s <= end_s:
                at_s += span.step_s
                yield at_s, RankActivity.STEP
            since_step_s, at_s = end_s - at_s, end_s
        if self.hang is not None and self.hang.activity is not RankActivity.STEP:
            yield at_s, self.hang.activity


def trace(seed: int) -> Trace:
    """Generate one trace."""
    rng = random.Random(seed)
    ranks, pp = rng.choice(((8, 1), (8, 2), (8, 4), (16, 1), (16, 4)))
    step_s = rng.choice((0.4, 1.0, 2.5, 6.0, 15.0, 40.0, 90.0))
    spans = [*_beginning(rng, step_s)]
    save_every, evaluate_every = rng.randrange(2, 6), rng.randrange(3, 9)
    for number in range(1, rng.randrange(5, 16)):
        spans += _training(rng, ranks, step_s)
        if number % save_every == 0:
            spans.append(_alone(rng, RankActivity.CHECKPOINTING, rng.uniform(0.5, 40), every_s=None))
            spans.append(_steps(rng, step_s))
        if number % evaluate_every == 0:
            spans.append(_alone(rng, RankActivity.EVALUATING, rng.uniform(30, 900), every_s=rng.uniform(1, 20)))
    hangs = rng.random() < HANG_SHARE
    hang = None
    if hangs:
        spans, hang = _hanging(rng, spans, ranks, pp)
    else:
        spans.append(_alone(rng, RankActivity.EXPORTING, rng.uniform(20, 600), every_s=rng.uniform(1, 15)))
    return Trace(seed=seed, ranks=ranks, pp=pp, spans=tuple(spans), hang=hang, recorder_off=rng.random() < RECORDER_OFF)


def _beginning(rng: random.Random, step_s: float) -> list[Span]:
    return [
        _alone(rng, RankActivity.STARTING, rng.uniform(5, 200), every_s=None),
        _alone(rng, RankActivity.LOADING, rng.uniform(10, 400), every_s=rng.uniform(1, 30)),
        Span(seconds=rng.uniform(1, 3) * step_s + rng.uniform(5, 250), activity=RankActivity.FIRST_STEP, every_s=40.0),
    ]


def _alone(rng: random.Random, activity: RankActivity, seconds: float, *, every_s: float | None) -> Span:
    shows = rng.choice(("work", "idle")) if every_s is None else "work"
    return Span(seconds=seconds, activity=activity, every_s=every_s, shows=shows)


def _steps(rng: random.Random, step_s: float) -> Span:
    """Steps one after another: each has marks of microbatches and layers, the longest a fifth of it."""
    seconds = max(20.0, step_s * rng.randrange(4, 12))
    return Span(seconds=seconds, activity=RankActivity.STEP, every_s=step_s / rng.uniform(5, 40), step_s=step_s)


def _training(rng: random.Random, ranks: int, step_s: float) -> list[Span]:
    """Steps, and at times what looks like a hang and is none."""
    found = [_steps(rng, step_s)]
    rank = rng.randrange(ranks)
    odd = rng.random()
    if odd < 0.08:  # the source of one rank is slow
        found.append(_pause(rng.uniform(3, 100), RankActivity.STEP, "data wait", rank))
    elif odd < 0.16:  # a link flaps, a switch restarts
        found.append(_pause(rng.uniform(3, 45), RankActivity.STEP, "all wait", -1))
    elif odd < 0.24:  # one rank collects garbage, throttles or swaps
        found.append(_pause(rng.uniform(3, 45), RankActivity.STEP, "outside", rank))
    elif odd < 0.30:  # kernels for another shape are compiled, on all ranks alike
        found.append(_pause(rng.uniform(20, 400), RankActivity.STEP, "work", -1))
    elif odd < 0.34:  # the launchers are not seen: a partition, or the leader was stopped
        found.append(dataclasses.replace(_steps(rng, step_s), seconds=rng.uniform(10, 300), seen=False))
    elif odd < 0.37:  # a process was stopped for a look by a debugger
        found.append(_pause(rng.uniform(3, 45), RankActivity.STEP, "stopped", rank))
    elif odd < 0.40:  # a stage of the curriculum begins
        found.append(Span(seconds=rng.uniform(5, 300), activity=RankActivity.FIRST_STEP, every_s=None, shows="outside"))
    return [*found, _steps(rng, step_s)]


def _pause(seconds: float, activity: RankActivity, shows: str, culprit: int) -> Span:
    return Span(seconds=seconds, activity=activity, every_s=None, shows=shows, culprit=culprit)


def _hanging(rng: random.Random, spans: list[Span], ranks: int, pp: int) -> tuple[list[Span], Span]:
    """Cut a trace somewhere, mostly in a step, and let it hang there."""
    chosen = rng.random()
    if chosen < 0.75:
        places = [number for number, span in enumerate(spans) if span.step_s is not None and span.seen]
    else:
        places = [number for number, span in enumerate(spans) if span.step_s is None and span.culprit < 0 and span.seen]
    at = rng.choice(places)
    span = spans[at]
    kinds = ["stopped", "outside", "outside idle", "all wait", "teardown"]
    if span.activity is RankActivity.STEP:
        kinds += ["fewer exchanges", *(["no send"] if pp > 1 else [])]
    elif span.every_s is None and span.shows == "idle":
        kinds = ["stopped", "all idle"]
    cut = dataclasses.replace(span, seconds=span.seconds * rng.random())
    hang = Span(
        seconds=float("inf"),
        activity=span.activity,
        every_s=None,
        shows=rng.choice(kinds),
        # Of the first stage, where sends go forward.
        culprit=rng.randrange(ranks // pp),
    )
    return [*spans[:at], cut], hang


def _shown(span: Span, rank: int, inner: int) -> dict[str, object]:
    """What a rank shows in a span: its wait, and what the kernel says of its process."""
    if span.shows in {"work", "idle", "all idle"}:
        return {"idle": span.shows != "work"}
    if span.shows == "no send":
        return _unsent(span, rank, inner)
    waits: dict[str, object] = {"wait": RankWait.EXCHANGE, "idle": True, "exchanges": 51}
    return waits if rank != span.culprit else waits | _CULPRIT[span.shows]


_NO_WAIT: dict[str, object] = {"wait": RankWait.NOTHING}
_CULPRIT: dict[str, dict[str, object]] = {
    "all wait": {},
    "outside": _NO_WAIT | {"idle": False},
    "outside idle": _NO_WAIT,
    "teardown": _NO_WAIT,
    "data wait": _NO_WAIT | {"activity": RankActivity.DATA_WAIT},
    "stopped": _NO_WAIT | {"stopped": True},
    "fewer exchanges": {"exchanges": 50},
}
"""What the rank shows that holds up the others, beside what they show."""


def _unsent(span: Span, rank: int, inner: int) -> dict[str, object]:
    """The first stage has skipped the send of its third microbatch, and waits for a gradient as if it had not."""
    stage, column = divmod(rank, inner)
    if column != span.culprit % inner or stage > 1:
        return {"wait": RankWait.EXCHANGE if column != span.culprit % inner else RankWait.FORWARD, "idle": True}
    if stage == 0:
        return {"wait": RankWait.BACKWARD, "microbatch": 0, "sent_forward": 4, "idle": True}
    return {"wait": RankWait.FORWARD, "microbatch": 2, "idle": True}


def looks(found: Trace, every_s: float, after_s: float) -> Iterator[tuple[float, list[RankState] | None]]:
    """Yield what the leader sees, every so often, and for some time after the hang; None: it sees nothing new."""
    at_s, moves, moved_s, step = 0.0, 0.0, 0.0, 1
    spans = [*found.spans, *([] if found.hang is None else [dataclasses.replace(found.hang, seconds=after_s)])]
    now_s = every_s
    for span in spans:
        end_s = at_s + span.seconds
        if span is not spans[0]:
            moves, moved_s = moves + 1, at_s
        if found.hang is not None and span is spans[-1]:
            moves -= 1
        first = moves
        while now_s < end_s:
            if span.every_s is not None:
                moves = first + int((now_s - at_s) / span.every_s)
                moved_s = at_s + (moves - first) * span.every_s
            if span.step_s is not None:
                step += every_s > span.step_s or int(now_s / span.step_s) != int((now_s - every_s) / span.step_s)
            states = _states(found, span, moves=int(moves), quiet_ms=int((now_s - moved_s) * 1000), step=step)
            yield now_s, states if span.seen else None
            now_s += every_s
        at_s = end_s


def _states(found: Trace, span: Span, *, moves: int, quiet_ms: int, step: int) -> list[RankState]:
    inner = found.ranks // found.pp
    common = {"activity": span.activity, "step": step, "moves": moves, "quiet_ms": quiet_ms}
    return [
        RankState(
            **{  # type: ignore[arg-type]
                **common,
                "rank": rank,
                "stage": rank // inner,
                "watched": not (found.recorder_off and rank == 0),
                **_shown(span, rank, inner),
            }
        )
        for rank in range(found.ranks)
    ]
