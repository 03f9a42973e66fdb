"""The command ``polyreme-operator``: reads its options, then starts the service where its libraries are installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from polyreme_api.extras import missing_extra
from polyreme_operator.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    try:
        # Imported after the options are read, so that --help works without the libraries of the service.
        from polyreme_operator.service import run_service
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, "operator")) is None:
            raise
        sys.stderr.write(f"polyreme-operator: {missing}\n")
        return int(missing.exit_code)
    return run_service(options)
