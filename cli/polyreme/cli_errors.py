"""End of a command line: one message on standard error and a documented exit code, whatever went wrong."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from polyreme.views.output import note
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.extras import missing_extra

MACHINE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE}
)
"""Errors of the operating system that say something of the machine, and nothing of this program."""


def invoke(app: typer.Typer, arguments: Sequence[str] | None, *, name: str) -> int:
    """Run a command line and return its exit code.

    Args:
        app: The commands.
        arguments: What was typed; None is the process's own.
        name: What a person types.
    """
    try:
        result = app(args=arguments, standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        note("stopped")
        return ExitCode.CANCELLED
    except typer.TyperException as error:
        if not str(error):
            # A command without arguments was answered by its help.
            return ExitCode.OK
        note(f"{name}: {error.format_message().removesuffix('.')}; see {_command(error, name)} --help")
        return ExitCode.USAGE
    except PolyremeError as error:
        note(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        note("stopped")
        return ExitCode.CANCELLED
    except Exception as error:  # noqa: BLE001 - the outermost edge: what no code above expected is our own error
        return _unexpected(error, name)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _command(error: typer.TyperException, name: str) -> str:
    """Return the command that an error is about, as a person types it."""
    words: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return " ".join([name, *words])


def _unexpected(error: Exception, name: str) -> int:
    """Report what the reader, the environment or the machine did; the rest is a bug, printed with its traceback."""
    if isinstance(error, BrokenPipeError):
        # The reader has enough, as head does; Python must not write to it again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error, "run", "kubectl")) is not None:
        note(f"{name}: {missing}")
        return missing.exit_code
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        note(f"{name}: the operating system refused: {error.strerror}: {error.filename}; fix the cause and try again")
        return ExitCode.ENVIRONMENT
    note("".join(traceback.format_exception(error)))
    note(
        f"{name}: internal error (exit code {ExitCode.INTERNAL}); this is a bug in polyreme, "
        "please report the lines above"
    )
    return ExitCode.INTERNAL
