"""The comparison of ``polyreme sim`` as one HTML file: shares over the interval, where the time went, the frontier."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme.report import svg
from polyreme.report.parts import document, table
from polyreme.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale, safe
from polyreme.views.formatting import duration, in_words, share
from polyreme_wind_tunnel.comparison import Row, formula
from polyreme_wind_tunnel.run import Spent

_HEIGHT_PX = 320
_COLOURS = 6
_LOST = tuple(kind for kind in Spent if kind is not Spent.PRODUCTIVE)


def build_page(rows: Sequence[Row], frontier: Sequence[tuple[int, float | None]], *, target: float) -> str:
    """Return the page, without scripts and without references to anything outside it."""
    best = max(rows, key=lambda row: row.effective_share)
    return document(
        "Wind tunnel",
        f'<h1>Wind tunnel</h1><p class="lead">Best of {len(rows)} policies: {safe(_name(best))}, a checkpoint every '
        f"{safe(duration(best.scenario.saves.interval_ms / 1000))}: {share(best.effective_share)} of the time is "
        f"training that is kept.</p><h2>Effective share of time</h2>{shares_chart(rows, target=target)}{_key(rows)}"
        f"<h2>Where the rest went</h2>{_losses(rows)}"
        f"<h2>Longest recovery for {share(target)}</h2>{_frontier(frontier)}",
    )


def shares_chart(rows: Sequence[Row], *, target: float) -> str:
    """Draw the share over the interval: a line for each policy, a dot for each run, dashes for the closed form."""
    intervals = [row.scenario.saves.interval_ms / 1000 for row in rows]
    shares = [value for row in rows for value in (row.effective_share, formula(row.scenario))]
    x = Scale(
        low=min(intervals) / 1.1,
        high=max(intervals) * 1.1,
        from_px=LEFT,
        to_px=WIDTH - RIGHT,
        logarithmic=True,
    )
    y = Scale(low=max(0.0, min([*shares, target]) - 0.02), high=1.0, from_px=_HEIGHT_PX - BOTTOM, to_px=TOP)
    parts = [svg.frame(x, y, name_x="seconds between checkpoints", name_y="effective share (ETTR)")]
    parts.append(svg.line([(x.from_px, y(target)), (x.to_px, y(target))], "lost-line c5", title=f"target {target:g}"))
    for at, (name, members) in enumerate(_by_policy(rows).items()):
        colour = f"c{at % _COLOURS}"
        dots = [(x(row.scenario.saves.interval_ms / 1000), y(row.effective_share)) for row in members]
        parts.append(svg.line(dots, colour, title=name))
        parts.append(
            svg.line(
                [(x(row.scenario.saves.interval_ms / 1000), y(formula(row.scenario))) for row in members],
                f"held-out {colour}",
                title=f"{name}, by formula",
            )
        )
        for dot, row in zip(dots, members, strict=True):
            parts.append(svg.dot(*dot, "held-out", title=f"{name}: {row.effective_share:.4f}"))
    return svg.picture(parts, height=_HEIGHT_PX, says="Effective share of time over the checkpoint interval")


def _by_policy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.scenario.saves.interval_ms):
        found.setdefault(_name(row), []).append(row)
    return found


def _name(row: Row) -> str:
    scenario = row.scenario
    predicted = f", {share(scenario.faults.recall)} predicted" if scenario.faults.recall else ""
    return f"{scenario.machines.spares} spares, {scenario.lowest_rung.value}{predicted}"


def _key(rows: Sequence[Row]) -> str:
    lines = "".join(
        f'<span class="c{at % _COLOURS}"><i class="line"></i>{safe(name)}</span>'
        for at, name in enumerate(_by_policy(rows))
    )
    return f'<p class="key">{lines}<span><i class="dashed"></i>closed form, with spares without end</span></p>'


def _losses(rows: Sequence[Row]) -> str:
    heads = ("policy", "#interval", *(f"#{in_words(kind)}" for kind in _LOST), "#failed runs")
    body = [
        (
            safe(_name(row)),
            safe(duration(row.scenario.saves.interval_ms / 1000)),
            *(share(row.shares[kind]) for kind in _LOST),
            share(row.given_up),
        )
        for row in rows
    ]
    return table(heads, body)


def _frontier(frontier: Sequence[tuple[int, float | None]]) -> str:
    body = [
        (safe(duration(interval_ms / 1000)), "none" if most_ms is None else safe(duration(most_ms / 1000)))
        for interval_ms, most_ms in frontier
    ]
    return table(("checkpoint every", "longest recovery, detection included"), body)
