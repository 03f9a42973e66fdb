"""PostgreSQL, Pulsar and S3 on this machine, for tests, benchmarks and people.

``up`` starts them on loopback, or where pods of ``make cluster-up`` reach them, and prints the variables that name
them, as lines for a shell; services that run already are kept. ``build`` gets the programs, once per user, and starts
nothing.
"""

import argparse
import shlex
import sys
from pathlib import Path

from tools.build_cache import BuildError
from tools.cluster.servers import ServerError
from tools.services.services import BRIDGE, FOLDER, build, down, listening_address, status, up


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.services", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "build"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--listen",
        metavar=f"{BRIDGE}|ADDRESS",
        help="listen there, with passwords; by default on loopback, without. "
        f"{BRIDGE}: where pods of this checkout's `make cluster-up NODES=2` find this machine",
    )
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "up":
                host = listening_address(options.listen) if options.listen else None
                for name, value in sorted(up(options.folder, host=host).items()):
                    print(f"export {name}={shlex.quote(value)}")
            case "down":
                down(options.folder)
            case "build":
                build()
            case _:
                return status(options.folder)
    except (BuildError, ServerError, OSError) as error:
        print(f"services {options.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
