"""``make soak-startup``: memory of a start at 1,024 ranks, of whole presets; ``make test`` opens shallow ones.

No accelerator is needed: tensors have no memory, and their storages are counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.trainer.parallel.fake_start import STARTS, counted_bytes, open_fake_world, planned_bytes

RATIO_MAX = 1.05


def main() -> int:
    """Open each preset; 0 if the planner is right about all of them within 5 %."""
    open_fake_world()
    figures: dict[str, float] = {}
    for name, (shape, layout) in STARTS.items():
        counted, planned = counted_bytes(shape, layout), planned_bytes(shape, layout)
        figures[f"{name}_counted_mib"] = counted // 2**20
        figures[f"{name}_counted_over_planned_ratio"] = round(counted / planned, 4)
    ratios = [value for name, value in figures.items() if name.endswith("_ratio")]
    ok = all(1 / RATIO_MAX <= ratio <= RATIO_MAX for ratio in ratios)
    line = {"name": "startup", "figures": figures, "bar": {"counted_over_planned_max_ratio": RATIO_MAX}, "ok": ok}
    sys.stdout.write(json.dumps(line) + "\n")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
