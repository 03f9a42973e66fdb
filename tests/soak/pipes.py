"""``make soak-pipes``: the gradient of one process in every schedule, alone and folded with the other dimensions.

Twenty steps from scratch follow one process too, with every token sent to every expert: where experts are chosen, the
last bit of a score decides between two that are alike, and from that step on the loss is another one by up to 1e-3.
Where there are data-parallel ranks, a third time one of them has all images.
``ONLY=`` keeps the pipelines whose name has that word. Figures: ``pipelines``, ``max_relative_error`` over all tensors
of all pipelines, chosen and not, ``max_loss_error`` over all steps.
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

from polyreme_planner.shapes import KIMI_VL_NANO
from tests.parallel.gangs import Gang, gradients, largest_difference, start_gang, warm
from tests.parallel.grid import TOLERANCE, UNEVEN
from tests.parallel.pipes import ALL, LAYERS, Pipe

CHOSEN: dict[str, Any] = {"steps": 1, "long": True, "decoder": {"layers": LAYERS}}
"""One step, experts chosen by score."""
FOLLOWED: dict[str, Any] = {
    "steps": 20,
    "long": True,
    "decoder": {"layers": LAYERS, "experts_per_token": KIMI_VL_NANO.decoder.experts},
}
"""Twenty, in which nothing is chosen."""


def dealt(pipe: Pipe) -> dict[str, Any]:
    """Ask for a step in which the first data-parallel rank has all images, and one of its microbatches none."""
    return {"steps": 1, "decoder": {"layers": LAYERS}, **UNEVEN, "seeing": pipe.microbatches - 1}


def main() -> int:
    """Run them; 0 when every gradient and every loss is that of one process."""
    began_s = time.perf_counter()
    pipes = [pipe for pipe in ALL if (os.environ.get("ONLY") or "") in str(pipe)]
    worst, worst_loss = 0.0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        grid = _Grid(Path(directory))
        for pipe in pipes:
            error, loss_error = grid.errors(pipe)
            worst, worst_loss = max(worst, error), max(worst_loss, loss_error)
            right = max(error, loss_error) <= TOLERANCE
            sys.stderr.write(f"{pipe!s:40} {error:.1e} {loss_error:.1e}{'' if right else '  WRONG'}\n")
    figures = {
        "pipelines": len(pipes),
        "max_relative_error": worst,
        "max_loss_error": worst_loss,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    ok = max(worst, worst_loss) <= TOLERANCE
    bar = {"max_relative_error": TOLERANCE, "max_loss_error": TOLERANCE}
    sys.stdout.write(json.dumps({"name": "pipes", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


class _Grid:
    """Runs pipelines, and one process beside each number of packs."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._context = directory, warm()
        self._alone: dict[tuple[Any, ...], Any] = {}

    def errors(self, pipe: Pipe) -> tuple[float, float]:
        """Of all gradients, and of all losses, against one process."""
        worst, worst_loss = 0.0, 0.0
        shared = pipe.degrees.get("dp", 1) > 1
        for asked in (CHOSEN, FOLLOWED, *([dealt(pipe)] if shared else [])):
            whole = asked | {"packs": pipe.packs}
            key = (asked["steps"], asked.get("seeing"), pipe.packs)
            if key not in self._alone:
                self._alone[key] = gradients(self._start, self._directory / f"alone {key}", {"dp": 1}, **whole)
            expected = self._alone[key]
            root = self._directory / f"{pipe} {asked['steps']} {asked.get('seeing')}"
            seen = gradients(self._start, root, pipe.degrees, **(pipe.request | whole))
            worst = max(worst, largest_difference(seen, expected))
            if "seeing" in asked and not max(seen["moved"]):
                worst = 1.0
            losses = zip(seen["losses"], expected["losses"], strict=True)
            worst_loss = max(worst_loss, *(abs(one - other) / other for one, other in losses))
        return worst, worst_loss

    def _start(self, body: str, *, layout: Any, root: Path, **request: Any) -> Gang:
        return start_gang(self._context, body, layout=layout, root=root, **request)


if __name__ == "__main__":
    raise SystemExit(main())
