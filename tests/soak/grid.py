"""``make soak-grid``: the gradient of one process in every layout of up to eight ranks, on two kinds of batches.

``ONLY=`` keeps the layouts whose name has that word. Figures: ``layouts`` and ``max_relative_error``, over all tensors
of all layouts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.parallel.gangs import Gang, gradients, largest_difference, start_gang, warm
from tests.parallel.grid import ALL, TOLERANCE, Degrees, name, ways

BATCHES = {"short": False, "long": True}
"""Many short pages with an image each; few long documents across the cuts, three images, an expert without a token."""


def main() -> int:
    """Run them; 0 when every gradient is that of one process."""
    began_s = time.perf_counter()
    context = warm()
    layouts = [layout for layout in ALL if (os.environ.get("ONLY") or "") in name(layout)]
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for kind, long in BATCHES.items():
            alone = _run(context, Path(directory) / kind, {"dp": 1}, long=long)
            for number, layout in enumerate(layouts):
                seen = _run(context, Path(directory) / f"{kind} {name(layout)}", layout, long=long, number=number)
                error = largest_difference(seen, alone)
                worst = max(worst, error)
                sys.stderr.write(f"{kind:6} {name(layout):32} {error:.1e}{'' if error <= TOLERANCE else '  WRONG'}\n")
    figures = {
        "layouts": len(layouts),
        "max_relative_error": worst,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    ok = worst <= TOLERANCE
    report = {"name": "grid", "figures": figures, "bar": {"max_relative_error": TOLERANCE}, "ok": ok}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if ok else 1


def _run(context: Any, root: Path, layout: Degrees, *, long: bool, number: int = 1) -> Any:
    def start(body: str, *, layout: Degrees, root: Path, **request: Any) -> Gang:
        return start_gang(context, body, layout=layout, root=root, **request)

    return gradients(start, root, layout, steps=1, long=long, **ways(number))


if __name__ == "__main__":
    raise SystemExit(main())
