"""Errors that every plane shares: one base, subclasses by what the caller does next.

A message reads *what failed: value seen, rule*, and ``field`` names what to change.
"""

from __future__ import annotations

from polyreme_api.exit_codes import ExitCode


class PolyremeError(Exception):
    """Base of every error that polyreme raises on purpose."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        """Append the field to change, when one is known."""
        return f"{self.message}; change {self.field}" if self.field else self.message


class InvalidConfigError(PolyremeError, ValueError):
    """A spec, a flag or a file says something that can't be; refused before anything starts."""

    exit_code = ExitCode.USAGE


class NotFoundError(PolyremeError):
    """A named thing does not exist."""

    exit_code = ExitCode.NOT_FOUND


class RefusedError(PolyremeError):
    """The state forbids the call: an edited spec, a finished run, a fenced writer."""

    exit_code = ExitCode.REFUSED


class FencedError(RefusedError):
    """The writer's attempt is no longer the current one: stop, write nothing more."""

    exit_code = ExitCode.FENCED


class WaitTimeoutError(PolyremeError):
    """What was waited for did not happen in time."""

    exit_code = ExitCode.TIMEOUT


class RetryableError(PolyremeError):
    """Try again after ``delay_s``; the state is unchanged, or the call is idempotent."""

    exit_code = ExitCode.ENVIRONMENT

    def __init__(self, message: str, *, delay_s: float = 1.0, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.delay_s = delay_s


class NotSealedError(RetryableError):
    """The samples of a step are still processed: ask again after ``delay_s``."""


class EnvironmentFailedError(PolyremeError):
    """Bounded retries against the machine or a store are used up; the run can continue later."""

    exit_code = ExitCode.ENVIRONMENT


class DataDamagedError(EnvironmentFailedError):
    """Stored data is not what was written; another try reads the same bytes, so nothing is retried."""

    exit_code = ExitCode.DATA_DAMAGED


class RunFailedError(PolyremeError):
    """The job failed for a reason of its own."""

    exit_code = ExitCode.RUN_FAILED


class StepFailedError(RunFailedError):
    """A step can't be trained, which a fault of memory or of a device may cause: it is retried once."""

    exit_code = ExitCode.STEP_FAILED


class RolledBackError(RunFailedError):
    """A spike of the loss ended the attempt; the next one resumes before it and skips its data."""

    exit_code = ExitCode.ROLLED_BACK


class SpikesPersistError(RunFailedError):
    """Rollbacks did not help: the run is paused until a person has looked at it."""

    exit_code = ExitCode.SPIKES_PERSIST


class CopiesDifferError(PolyremeError):
    """Parameters of this rank differ from the copies of other ranks."""

    exit_code = ExitCode.COPIES_DIFFER
