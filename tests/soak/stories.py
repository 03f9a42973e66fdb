"""``make soak-stories``: the tests marked ``soak``, each a whole story of minutes (``ONLY=`` as pytest's ``-k``).

What a user is promised by them is tested in CI by shorter ones too. Figures: those of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run them, two side by side; pytest's code, which is 5 where ``ONLY`` keeps none."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--timeout=900", "-m", "soak"]
    only = os.environ.get("ONLY")
    return subprocess.run([*command, *(["-k", only] if only else []), "tests"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
