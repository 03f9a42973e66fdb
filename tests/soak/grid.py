"""``make soak-grid``: the gradient of one process in every layout of up to eight ranks, on five kinds of batches.

Once more rows are dropped, and one process that drops the same is what each layout is compared with.
``ONLY=`` keeps the layouts whose name has that word, ``BATCHES=`` kinds of batches (``drops`` is the last). Figures:
``layouts`` and ``max_relative_error``, over all tensors of all layouts; ``dropped``, the fewest rows that a layer of a
layout with a capacity dropped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.parallel.gangs import Gang, gradients, largest_difference, start_gang, warm
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
DROPS = "drops"


def main() -> int:
    """Run them; 0 when every gradient is that of one process."""
    began_s = time.perf_counter()
    context = warm()
    layouts = [layout for layout in ALL if (os.environ.get("ONLY") or "") in name(layout)]
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        kinds = (os.environ.get("BATCHES") or ",".join([*BATCHES, DROPS])).split(",")
        for kind, pages in ((kind, BATCHES[kind]) for kind in kinds if kind != DROPS):
            alone = _run(context, Path(directory) / kind, {"dp": 1}, **pages)
            for number, layout in enumerate(layouts):
                seen = _run(context, Path(directory) / f"{kind} {name(layout)}", layout, number=number, **pages)
                error = largest_difference(seen, alone)
                worst = max(worst, error)
                sys.stderr.write(f"{kind:10} {name(layout):32} {error:.1e}{'' if error <= TOLERANCE else '  WRONG'}\n")
        found, dropped = _capacity(context, Path(directory), layouts) if DROPS in kinds else (0.0, 1)
        worst = max(worst, found)
    figures = {
        "layouts": len(layouts),
        "max_relative_error": worst,
        "dropped": dropped,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    ok = worst <= TOLERANCE and dropped > 0
    report = {"name": "grid", "figures": figures, "bar": {"max_relative_error": TOLERANCE}, "ok": ok}
    sys.stdout.write(json.dumps(report) + "\n")
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


def _run(context: Any, root: Path, layout: Degrees, *, number: int = 3, **more: Any) -> Any:
    def start(body: str, *, layout: Degrees, root: Path, **request: Any) -> Gang:
        return start_gang(context, body, layout=layout, root=root, **request)

    return gradients(start, root, layout, steps=1, **ways(number), **more)


if __name__ == "__main__":
    raise SystemExit(main())
