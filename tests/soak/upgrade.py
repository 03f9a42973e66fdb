"""``make soak-upgrade``: helm upgrade and rollback in mid-job, from the images of an earlier commit.

``PREVIOUS=`` a commit of the history, that of the kept chart by default; as root, on nodes of its own. In
``make test-nodes`` the images of this checkout pose as the earlier ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.nodes.cluster import ROOT
from tests.nodes.previous import KEPT_CHART_COMMIT, VARIABLE


def main() -> int:
    """Run; 0 when every test passed."""
    environment = {**os.environ, VARIABLE: os.environ.get(VARIABLE) or KEPT_CHART_COMMIT}
    words = ("-m", "pytest", "-q", "--timeout=1800", "-m", "nodes", "tests/nodes/test_4_upgrade.py")
    return subprocess.run([sys.executable, *words], check=False, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
