"""``make soak-pipes``: the gradient of one process in every schedule, alone and folded with the other dimensions.

Twenty steps from scratch follow one process too. ``ONLY=`` keeps the pipelines whose name has that word. Figures:
``pipelines``, ``max_relative_error`` over all tensors of all pipelines, ``max_loss_error`` over all steps.
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
from tests.parallel.grid import TOLERANCE
from tests.parallel.pipes import ALL, LAYERS

STEPS = 20
LOSS_TOLERANCE = 5e-3
"""Largest difference of a step's loss, relative to it: a token whose experts score alike may choose another by the last
bit, and AdamW's first steps make much of small gradients. Seen: 4e-7 where no token does, else up to 1e-3."""


def main() -> int:
    """Run them; 0 when every gradient and every loss is that of one process."""
    began_s = time.perf_counter()
    context = warm()
    chosen = [pipe for pipe in ALL if (os.environ.get("ONLY") or "") in str(pipe)]
    worst, worst_loss = 0.0, 0.0

    def start(body: str, *, layout: Any, root: Path, **request: Any) -> Gang:
        return start_gang(context, body, layout=layout, root=root, **request)

    with tempfile.TemporaryDirectory() as directory:
        alone: dict[int, Any] = {}
        for pipe in chosen:
            whole = {"steps": STEPS, "long": True, "decoder": {"layers": LAYERS}, "packs": pipe.packs}
            if pipe.packs not in alone:
                alone[pipe.packs] = gradients(start, Path(directory) / f"alone {pipe.packs}", {"dp": 1}, **whole)
            expected = alone[pipe.packs]
            seen = gradients(start, Path(directory) / str(pipe), pipe.degrees, **(whole | pipe.request))
            error = largest_difference(seen, expected)
            losses = zip(seen["losses"], expected["losses"], strict=True)
            loss_error = max(abs(one - other) / other for one, other in losses)
            worst, worst_loss = max(worst, error), max(worst_loss, loss_error)
            right = error <= TOLERANCE and loss_error <= LOSS_TOLERANCE
            sys.stderr.write(f"{pipe!s:40} {error:.1e} {loss_error:.1e}{'' if right else '  WRONG'}\n")
    figures = {
        "pipelines": len(chosen),
        "max_relative_error": worst,
        "max_loss_error": worst_loss,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    ok = worst <= TOLERANCE and worst_loss <= LOSS_TOLERANCE
    bar = {"max_relative_error": TOLERANCE, "max_loss_error": LOSS_TOLERANCE}
    sys.stdout.write(json.dumps({"name": "pipes", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
