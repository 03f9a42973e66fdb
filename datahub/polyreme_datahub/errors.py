"""What goes wrong in the data plane, by what the caller does next."""

from __future__ import annotations

from polyreme_api.errors import (
    DataDamagedError,
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
)


class DatahubError(PolyremeError):
    """Base of the data plane's own errors."""


class BadRecordError(DatahubError):
    """A record breaks a rule: it becomes a dead letter, and processing goes on."""

    def __init__(self, message: str, *, rule: str, sample_id: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.sample_id = sample_id
        """The record's own name, where that much of it could be read."""


class DatasetNotFoundError(DatahubError, NotFoundError):
    """No dataset of that name, or no such version of it."""


class SourceInvalidError(DatahubError, InvalidConfigError):
    """What a dataset shall be made from does not exist or has no known form."""


class SourceAwayError(DatahubError, EnvironmentFailedError):
    """A source's files can't be read now; that says nothing about the record."""


class IndexDamagedError(DatahubError, DataDamagedError):
    """Stored bytes of an index or a blob are missing, or do not fit their digest."""


class RegistryDamagedError(DatahubError, EnvironmentFailedError):
    """The registry's file is damaged: another try reads the same bytes."""


class RegistryFailedError(DatahubError, EnvironmentFailedError):
    """The registry's database did not answer within its bounded retries."""
