"""A Kubernetes control plane on this machine, for tests, benchmarks and people.

``up`` takes the cluster that KUBECONFIG names, if it names one; else it starts etcd, API server, controller-manager,
scheduler and KWOK on loopback ports, from KUBEBUILDER_ASSETS or from programs that it builds once. Standard output is
the path of the kubeconfig and nothing else.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.build_cache import BuildError
from tools.cluster.cluster import FOLDER, build, down, status, up
from tools.cluster.servers import ServerError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "build"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "up":
                print(up(options.folder, os.environ))
            case "down":
                down(options.folder)
            case "build":
                build(options.folder, os.environ)
            case _:
                return status(options.folder, os.environ)
    except (BuildError, ServerError, OSError, subprocess.CalledProcessError) as error:
        print(f"cluster {options.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
