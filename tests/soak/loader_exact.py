"""``make soak-loader-exact``: every global batch against a naive walker, with readers of other ranks killed at random.

``STEPS=`` steps, 600 by default, of eight sources whose weights change twice, the second time by an entry that is
appended after the first kill of each pass, packed, one of them augmented, with bad
records and a damaged sample; ``KILLS=`` kills, 40 by default; ``SEED=`` draws data, ranks, threads and moments.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.datahub.exact_loading import RANKS, SOURCES, THREADS, plant, read, state_bytes, verdict, whole_lines

STEPS, KILLS, SAMPLES = 600, 40, 60
STATE_BYTES_MAX = 280
"""200, and the digest of the tokenizer, which runs that start from a checkpoint with other data need to know."""
BAR = {"mismatched": 0, "lost": 0, "repeated": 0, "damaged": 1}


def main() -> int:
    """Run; 0 when every batch was the walker's."""
    steps, kills = int(os.environ.get("STEPS") or STEPS), int(os.environ.get("KILLS") or KILLS)
    seed = int(os.environ.get("SEED") or 1)
    rng, began_s = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polyreme-soak-", dir=os.environ.get("TMPDIR") or "/var/tmp") as name:
        folder = Path(name)
        planted = plant(folder, samples=SAMPLES, steps=steps, rng=rng)
        read(planted, folder / "alone", ranks=1, threads=1, steps=steps, kill=None)
        read(planted, folder / "alone", ranks=1, threads=4, steps=steps, kill=None)
        killed, rounds = 0, 0
        while killed < kills:
            # Each pass over the job reads it to its end, from where the kills leave it.
            (folder / "ranks" / "state.json").unlink(missing_ok=True)
            rounds += 1
            left = kills - killed
            for number in range(left + 1):
                ranks = RANKS[number % len(RANKS)]
                kill = rng if number < left else None
                threads, appended = rng.choice(THREADS), number > 0 or kill is None
                if read(
                    planted,
                    folder / "ranks",
                    ranks=ranks,
                    threads=threads,
                    steps=steps,
                    kill=kill,
                    appended=appended,
                ):
                    break
                killed += 1
                print(f"kill {killed} of {kills}, {ranks} ranks", file=sys.stderr, flush=True)
        state = json.loads((folder / "ranks" / "state.json").read_text())
        size = state_bytes(folder / "ranks")
        found = verdict(planted, whole_lines(folder / "alone"), whole_lines(folder / "ranks"), steps)
    per_source = round(len(json.dumps(state["window"]["base"], separators=(",", ":"))) / SOURCES, 1)
    figures: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "kills": killed,
        "passes": rounds,
        **found,
        "state_bytes": size,
    }
    figures |= {"state_bytes_per_source": per_source, "wall_s": round(time.monotonic() - began_s)}
    bar = {**BAR, "state_bytes": STATE_BYTES_MAX}
    ok = all(figures[name] == value for name, value in BAR.items()) and size <= STATE_BYTES_MAX
    sys.stdout.write(json.dumps({"name": "soak-loader-exact", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
