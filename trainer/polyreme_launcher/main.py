"""``python -m polyreme_launcher``: the command of every worker's container."""

from __future__ import annotations

import asyncio
import os
import sys

from polyreme_api.clock import MonotonicWallClock
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_launcher.agent import Launcher
from polyreme_system.clock import SystemClock


def main() -> int:
    """Launch the ranks of this pod; return the exit code."""
    try:
        launcher = Launcher(environment=os.environ, clock=MonotonicWallClock(SystemClock()))
        return asyncio.run(launcher.run())
    except PolyremeError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return int(ExitCode.ENVIRONMENT)
