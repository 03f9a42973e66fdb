"""``make soak-sim``: many seeds of the simulation (``SEEDS=``, ``FIRST=``), and every planted bug.

Seeds go from ``FIRST`` on, by default after those that the tests run. Nothing is resumed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulator.planted_bugs import CAUGHT_WITHIN, OF_HEALTH
from tests.simulator.seed_soak import seeds_asked, soak

SEEDS = 2_000
FIRST = 1000


def main() -> int:
    """Run them; 0 when no rule was broken and every bug was caught."""
    bugs = CAUGHT_WITHIN.keys() - OF_HEALTH
    return soak("sim", seeds=seeds_asked(SEEDS, first=FIRST), bugs=bugs, processes=os.cpu_count() or 1)


if __name__ == "__main__":
    raise SystemExit(main())
