"""Build the S3 server that tests run, if it is nowhere yet, and print its path."""

import os
import sys

from tools.build_cache import BuildError
from tools.s3.server import program


def main() -> int:
    """Build; 1 when that failed, with the reason."""
    try:
        print(program(os.environ))
    except (BuildError, OSError) as error:
        print(f"no S3 server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
