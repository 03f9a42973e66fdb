"""Writes manifests/ and the golden files of the chart: ``python -m tools.charts``, with Helm."""

import os
import shutil
import sys

from tools.build_cache import BuildError
from tools.charts.render import ROOT, HelmError, outputs
from tools.cluster.binaries import programs


def main() -> int:
    """Write the files that are stale, and print their paths; 1 if Helm can't be had or fails."""
    try:
        if shutil.which("helm") is None:
            programs(os.environ, ["helm"])
        for path, text in outputs().items():
            if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text:
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_text(text, encoding="utf-8")
                print(path)
    except (BuildError, HelmError) as error:
        print(f"no manifests: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
