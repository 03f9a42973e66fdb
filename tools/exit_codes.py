"""Write docs/reference/exit-codes.md from the table of exit codes and the errors that use them."""

import sys
from pathlib import Path

from polyreme_api import errors
from polyreme_api.exit_codes import ExitCode

HEAD = """# Exit codes

Exit codes of every polyreme process. Generated from `api/polyreme_api/exit_codes.py` by `make docs`.

"Commands" are `polyreme`, `kubectl polyreme` and their subcommands; "all" adds the operator, and in a run the launcher
(one per pod), the ranks and the data worker. "Errors" are the classes in `polyreme_api.errors` that end a process with
the code. A failure rule of a job (`failurePolicy.rules[].onExitCodes`) matches the codes of ranks, and of
containers that ended.

| code | name | processes | meaning | what to do | errors |
|---|---|---|---|---|---|
"""
TAIL = """
A process that a signal ended has code 128 + the number of the signal, as shells and Kubernetes report it: 137 is
SIGKILL, which the kernel sends when memory is short, and 143 is SIGTERM.
"""


def render() -> str:
    """Render the page."""
    return HEAD + "".join(_row(code) for code in ExitCode) + TAIL


def _row(code: ExitCode) -> str:
    cells = (str(code.value), f"`{code.name}`", code.processes, code.meaning, code.remedy, ", ".join(_errors(code)))
    return f"| {' | '.join(cells)} |\n"


def _errors(code: ExitCode) -> list[str]:
    return [
        f"`{name}`"
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PolyremeError) and kind.exit_code is code
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
