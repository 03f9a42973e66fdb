"""Write a set of files to keep: what this version stores, for later versions to read in their tests.

python -m tests.kept.keep_files tests/kept/v0.2.0
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.kept import keep_cluster, keep_home

CRDS = Path("charts/polyreme/files/crds")


def main(folder: Path) -> None:
    """Write the set into a new folder."""
    folder.mkdir(parents=True)
    keep_cluster.keep(folder)
    shutil.copytree(CRDS, folder / "crds", ignore=shutil.ignore_patterns("Kustomization"))
    keep_home.keep(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
