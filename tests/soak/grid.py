"""``make soak-grid``: the gradient of one process in every layout of up to eight ranks, on five kinds of batches.

Once more rows are dropped, and one process that drops the same is what each layout is compared with.
``ONLY=`` keeps the layouts whose name has that word, ``BATCHES=`` kinds of batches (``drops`` and ``answers`` are the
last, and ``answers`` runs only where it is named). Figures, of the kinds that ran: ``layouts`` and
``max_relative_error``, over all tensors of all layouts; ``dropped``, the fewest rows that a layer of a layout with a
capacity dropped; of ``answered`` layouts, ``other_answers`` whose answers are not those of one process.

``BATCHES=answers``, measured in November 2026: 235 layouts, none with other answers; 33 minutes beside other work.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme_planner.layout import Layout
from tests.parallel.gangs import Gang, answered, gradients, largest_difference, start_gang, warm
from tests.parallel.grid import ALL, CAPACITY, TOLERANCE, UNEVEN, Degrees, name, senders_key, ways

PAIRS: dict[str, Any] = {
    "pairs_from": 1,
    "stages": [{"name": "prefer", "steps": 1, "objective": {"kind": "Preference", "beta": "0.5"}}],
}
BATCHES: dict[str, dict[str, Any]] = {
    "short": {},
    "long": {"long": True},
    "uneven": UNEVEN,
    "pairs": PAIRS,
    "long pairs": {**PAIRS, "long": True},
}
"""Many short pages with an image each; few long documents across the cuts, three images, an expert without a token; all
images in one pack; two answers to each prompt, by their preference; the same with answers across the cuts."""
DROPS, ANSWERS = "drops", "answers"
BAR = {"max_relative_error": TOLERANCE, "other_answers": 0}
RANKS_MAX = 8
STAGES: dict[int, list[int]] = {2: [1, 2], 4: [0, 1, 1, 1]}
"""Layers of each stage, by the stages of a pipeline."""
ZERO_BUBBLE: dict[str, Any] = {
    "layout": {"pp": 2, "tp": 2, "dp": 2, "ep": 2},
    "pipeline": {"schedule": "ZBVZeroBubble", "layers": [1, 1, 1, 0], "microbatches": 4},
}
"""A rank holds the first and the last stage."""


def main() -> int:
    """Run them; 0 when every gradient is that of one process."""
    began_s = time.perf_counter()
    context = warm()
    layouts = [layout for layout in ALL if (os.environ.get("ONLY") or "") in name(layout)]
    figures: dict[str, Any] = {"layouts": len(layouts)}
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        kinds = (os.environ.get("BATCHES") or ",".join([*BATCHES, DROPS])).split(",")
        for kind, pages in ((kind, BATCHES[kind]) for kind in kinds if kind in BATCHES):
            alone = _run(context, Path(directory) / kind, {"dp": 1}, **pages)
            for number, layout in enumerate(layouts):
                seen = _run(context, Path(directory) / f"{kind} {name(layout)}", layout, number=number, **pages)
                error = largest_difference(seen, alone)
                worst = max(worst, error)
                sys.stderr.write(f"{kind:10} {name(layout):32} {error:.1e}{'' if error <= TOLERANCE else '  WRONG'}\n")
        if DROPS in kinds:
            found, figures["dropped"] = _capacity(context, Path(directory), layouts)
            worst = max(worst, found)
        if set(kinds) != {ANSWERS}:
            figures["max_relative_error"] = worst
        if ANSWERS in kinds:
            figures["answered"], figures["other_answers"] = _answers(context, Path(directory), layouts)
    figures["wall_s"] = round(time.perf_counter() - began_s, 1)
    bar = {name: most for name, most in BAR.items() if name in figures}
    ok = all(figures[name] <= most for name, most in bar.items()) and figures.get("dropped") != 0
    sys.stdout.write(json.dumps({"name": "grid", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def _capacity(context: Any, directory: Path, layouts: Sequence[Degrees]) -> tuple[float, int]:
    """Compare layouts that drop rows; return the largest error and the fewest rows that a layer dropped."""
    references: dict[tuple[int, ...], Any] = {}
    worst, fewest = 0.0, sys.maxsize
    for number, layout in enumerate(layouts):
        key = senders_key(layout)
        if key not in references:
            same = {"layout": layout, "capacity": CAPACITY}
            references[key] = _run(context, directory / f"as in {key}", {"dp": 1}, long=True, as_in=same)
        root = directory / f"capacity {name(layout)}"
        seen = _run(context, root, layout, long=True, number=number, capacity=CAPACITY)
        error = largest_difference(seen, references[key])
        same_drops = seen["dropped"] == references[key]["dropped"]
        worst, fewest = max(worst, error if same_drops else 1.0), min(fewest, *map(sum, seen["dropped"]))
        right = error <= TOLERANCE and same_drops
        sys.stderr.write(f"drops  {name(layout):32} {error:.1e}{'' if right else '  WRONG'}\n")
    return worst, fewest


def _answers(context: Any, directory: Path, layouts: Sequence[Degrees]) -> tuple[int, int]:
    """Answer in every layout; return in how many, and in how many of them the answers are not those of one process."""

    def start(body: str, *, layout: Degrees, root: Path, **request: Any) -> Gang:
        return start_gang(context, body, layout=layout, root=root, **request)

    alone = answered(start, directory / "answers alone", rows=1, layout={"dp": 1})
    seen_in, other = 0, 0
    for way in _answering(layouts):
        title = f"{name(way['layout'])}{' rows' if 'parameter_sharding' in way else ''}"
        seen = answered(start, directory / f"answers {title}", rows=4, **way)
        seen_in, other = seen_in + 1, other + (seen != alone)
        sys.stderr.write(f"answers    {title:32} {'same' if seen == alone else 'OTHERS'}\n")
    return seen_in, other


def _answering(layouts: Sequence[Degrees]) -> Iterator[dict[str, Any]]:
    """Yield each layout as it is, with rows of parameters, and as the stages of pipelines of eight ranks."""
    for layout in layouts:
        yield {"layout": layout}
        yield {"layout": layout, "parameter_sharding": "FSDP2"}
        for pp, layers in STAGES.items():
            if Layout(**layout).world * pp == RANKS_MAX:
                pipeline = {"schedule": "1F1B", "layers": layers, "microbatches": pp}
                yield {"layout": {"pp": pp, **layout}, "pipeline": pipeline}
    yield ZERO_BUBBLE


def _run(context: Any, root: Path, layout: Degrees, *, number: int = 3, **more: Any) -> Any:
    def start(body: str, *, layout: Degrees, root: Path, **request: Any) -> Gang:
        return start_gang(context, body, layout=layout, root=root, **request)

    return gradients(start, root, layout, steps=1, **ways(number), **more)


if __name__ == "__main__":
    raise SystemExit(main())
