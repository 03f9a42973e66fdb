"""Images of an earlier commit, so that an upgrade is one from what really ran then."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.nodes.cluster import ROOT, Cluster
from tests.nodes.release import THIN
from tools.images import base
from tools.images.build import THIN_SUFFIX

VARIABLE = "PREVIOUS"
"""Names the commit; without it the images of this checkout pose as those of the previous version."""
KEPT_CHART_COMMIT = "e346a92"
"""Of the chart in ``kept``."""


def load_previous(cluster: Cluster, commit: str, tag: str) -> None:
    """Build thin images of a commit in a worktree of it, and give them a tag in every node.

    Args:
        cluster: Nodes of the tests' own, with the images of this checkout, which they have again in the end.
        commit: A commit of this repository.
        tag: Its tag in the nodes.

    Raises:
        CalledProcessError: If the history lacks the commit, or it can't be built.
    """
    with tempfile.TemporaryDirectory(prefix="polyreme-previous-") as name:
        worktree = Path(name, "checkout")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", worktree, commit], check=True)
        try:
            environment = {**os.environ, "PYTHONPATH": str(worktree)}
            words = ("-m", "tools.images", "build", "--base", base.LOCAL, "--folder", name, "--thin", *THIN)
            subprocess.run([sys.executable, *words], check=True, cwd=worktree, env=environment)
            cluster.load([Path(name, f"{image}{THIN_SUFFIX}.tar") for image in THIN])
            cluster.tag(tag)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", worktree], check=True)
    cluster.load([ROOT / "build/images/thin" / f"{image}{THIN_SUFFIX}.tar" for image in THIN])
