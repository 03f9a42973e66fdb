"""Queues and nodes: the tree of queues with quota, borrowing and waiting jobs; the topology with its nodes' health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.live import live_part, opened, stream
from polyreme.console.route import Route
from polyreme.plugin.console.overview import job_link
from polyreme.plugin.console.source import ClusterSource
from polyreme.plugin.domains import HOST, Domain, picture
from polyreme.plugin.nodes import HEADINGS, rows_of, spares_of
from polyreme.plugin.queue_tree import QueueRow, queue_rows
from polyreme.plugin.reading import Sight
from polyreme.report.parts import meter, table
from polyreme.report.svg import safe
from polyreme.views.formatting import NOTHING
from polyreme_api.labels import KIND_JOB

PATH = "/queues"
DOMAINS_MAX = 200
"""Rows of the topology."""
JOBS_MAX = 4
"""Jobs that the row of a domain names."""
WANTED: Mapping[str, str | None] = dict.fromkeys((KIND_JOB, "TrainingQueue", "ClusterTopology", "Node", "Pod"))


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the page."""
    source, domain = console.source_as(request, ClusterSource), request.query.get("domain", "")[:253]
    part = await opened(lambda: _part(source, domain))
    live = live_part(markup.query("/live/queues", {"domain": domain}), part)
    return console.page("Queues and nodes", f"<h1>Queues and nodes</h1>{live}", current=PATH)


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the page as it changes."""
    source, domain = console.source_as(request, ClusterSource), request.query.get("domain", "")[:253]
    return await stream(console, request, lambda: _part(source, domain))


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Queues and nodes", place=4),
    Route(method="GET", path="/live/queues", handle=follow),
)


async def _part(source: ClusterSource, domain: str) -> str:
    sight = await source.look(WANTED, home=source.namespace)
    return _queues(sight) + _topology(sight, domain) + _nodes(sight)


def _queues(sight: Sight) -> str:
    if sight.lacks("TrainingQueue"):
        return "<h2>Queues</h2>" + _left_out(sight, "Queues are not shown", "TrainingQueue")
    whole = not sight.lacks(KIND_JOB, "TrainingQueue", "Node")
    rows = queue_rows(sight.seen, whole=whole, heads=True)
    cells = [cell for row in rows for cell in _queue_cells(row)]
    words = "Jobs of other namespaces are counted as the operator last wrote"
    return (
        "<h2>Queues</h2><p class='soft'>In a terminal: <code>kubectl polyreme queue</code></p>"
        + table(("queue", "resource", "#used", "#quota", "", "#borrowed", "#waiting", "#running", "note"), cells)
        + "".join(markup.notice(f"{row.name}: {row.message}") for row in rows if row.message)
        + _left_out(sight, words, KIND_JOB)
        + "".join(_head(row) for row in rows if row.head)
    )


def _queue_cells(row: QueueRow) -> list[list[str]]:
    note = "; ".join(filter(None, (row.problem, f"stopPolicy {row.stopped}" if row.stopped else "")))
    indent = "&#8195;" * row.depth
    first, last = f"{indent}{safe(row.name)}", [f"{row.waiting:,}", f"{row.admitted:,}", safe(note or NOTHING)]
    if not row.pieces:
        return [[first, NOTHING, NOTHING, NOTHING if row.problem else "unlimited", "", NOTHING, *last]]
    return [
        [
            first if at == 0 else "",
            safe(piece.resource),
            f"{piece.used:,}",
            f"{piece.quota:,}",
            meter(piece.used / piece.quota if piece.quota else float(piece.used > 0), ""),
            f"{piece.borrowed:,}" if piece.borrowed else NOTHING,
            *(last if at == 0 else ["", "", ""]),
        ]
        for at, piece in enumerate(row.pieces)
    ]


def _head(row: QueueRow) -> str:
    rows = [[f"{place:,}", job_link(name), f"{priority}", safe(why)] for place, name, priority, why in row.head]
    more = row.waiting - len(row.head)
    return f"<h3>Waiting in {safe(row.name)}</h3>{table(('#place', 'job', '#priority', 'reason'), rows)}" + (
        f"<p class='soft'>and {more:,} more</p>" if more > 0 else ""
    )


def _topology(sight: Sight, domain: str) -> str:
    if sight.lacks("Node"):
        return "<h2>Topology</h2>" + _left_out(sight, "Nodes are not shown", "Node")
    whole = not sight.lacks(KIND_JOB, "Pod")
    drawn = picture(sight.seen, domain=domain or None, whole=whole)
    rows = [_domain_cells(each, depth, whole=whole) for each, depth in _walk(drawn.root, 0)]
    typed = f"kubectl polyreme topology --domain {domain}" if domain else "kubectl polyreme topology"
    back = f"<p>{markup.link(PATH, 'the whole topology')}</p>" if domain else ""
    more = f"<p class='soft'>and {len(rows) - DOMAINS_MAX:,} more domains; choose one</p>" if rows[DOMAINS_MAX:] else ""
    return (
        f"<h2>Topology</h2><p class='soft'>In a terminal: <code>{safe(typed)}</code></p>{back}"
        + table(("domain", "#devices", "#used", "#free", "", "#nodes", "#unusable", "jobs"), rows[:DOMAINS_MAX])
        + more
        + "".join(markup.notice(problem) for problem in drawn.problems)
        + _left_out(sight, "Only pods and jobs of your namespace are counted", KIND_JOB, "Pod")
        + _left_out(sight, "Levels are not shown", "ClusterTopology")
    )


def _walk(domain: Domain, depth: int) -> Iterable[tuple[Domain, int]]:
    yield domain, depth
    for child in domain.below:
        yield from _walk(child, depth + 1)


def _domain_cells(domain: Domain, depth: int, *, whole: bool) -> list[str]:
    words = f"{domain.level} {domain.name}".strip()
    named = safe(words)
    if domain.level and domain.level != HOST:
        named = markup.link(markup.query(PATH, {"domain": domain.name}), words)
    why = f" <span class='soft'>{safe(domain.why)}</span>" if domain.why else ""
    ranked = sorted(domain.jobs.items(), key=lambda entry: (-entry[1], entry[0]))
    jobs = [f"{job_link(name)} &times;{count}" for name, count in ranked[:JOBS_MAX]]
    jobs += [f"{len(ranked) - JOBS_MAX} more"] if len(ranked) > JOBS_MAX else []
    share = domain.used / domain.devices if domain.devices else 0.0
    return [
        f"{'&#8195;' * depth}{named}{why}",
        f"{domain.devices:,}",
        f"{domain.used:,}",
        f"{domain.free:,}" if whole else NOTHING,
        meter(share, ""),
        f"{domain.nodes:,}",
        f"{domain.unusable:,}" if domain.unusable else NOTHING,
        ", ".join(jobs) or NOTHING,
    ]


def _nodes(sight: Sight) -> str:
    if sight.lacks("Node"):
        return ""
    spares = spares_of(sight.found.get("ClusterTopology", ()))
    rows = rows_of(sight.found.get("Node", ()), everything=False, spares=spares)
    typed = "<p class='soft'>In a terminal: <code>kubectl polyreme nodes</code></p>"
    if not rows:
        return f"<h2>Nodes out of service</h2>{typed}<p>All nodes take workers.</p>"
    cells = [[safe(cell or NOTHING) for cell in row.cells] for row in rows]
    return f"<h2>Nodes out of service, at risk, or spare</h2>{typed}{table([each.lower() for each in HEADINGS], cells)}"


def _left_out(sight: Sight, what: str, *kinds: str) -> str:
    return "".join(markup.notice(line) for line in sight.left_out(what, *kinds))
