"""PostgreSQL, Pulsar and S3 on this machine, for tests, benchmarks and people.

``up`` starts them on loopback and prints the variables that name them, as lines for a shell; services that run already
are kept. ``build`` gets the programs, once per user, and starts nothing.
"""

import argparse
import shlex
import sys
from pathlib import Path

from tools.build_cache import BuildError
from tools.cluster.servers import ServerError
from tools.services.services import FOLDER, build, down, status, up


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.services", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "build"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--host", help="listen on this address, with passwords; by default on loopback, without")
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "up":
                for name, value in sorted(up(options.folder, host=options.host).items()):
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
