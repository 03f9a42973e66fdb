"""The command ``polyreme-datahub``: reads its options, then starts the service where its libraries are installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_api.extras import missing_extra
from polyreme_datahub_service.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare data until SIGTERM or SIGINT; return the exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
        # Imported after the options are read, so that --help works without the libraries of the service.
        from polyreme_datahub_service.service import run_service

        return run_service(options)
    except InvalidConfigError as error:
        sys.stderr.write(f"polyreme-datahub: {error}\n")
        return int(error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, "kubectl", "run")) is None:
            raise
        sys.stderr.write(f"polyreme-datahub: {missing}\n")
        return int(missing.exit_code)


if __name__ == "__main__":
    sys.exit(main())
