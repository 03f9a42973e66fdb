"""Errors of the data plane, by what the caller does next."""

from __future__ import annotations

from polyreme_api.errors import (
    DataDamagedError,
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
    RefusedError,
    RetryableError,
)


class DatahubError(PolyremeError):
    """Base of the data plane's own errors."""


class BadRecordError(DatahubError):
    """A record breaks a rule: it becomes a dead letter, and processing continues."""

    def __init__(self, message: str, *, rule: str, sample_id: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.sample_id = sample_id
        """The record's own name, where that much of it could be read."""


class DatasetNotFoundError(DatahubError, NotFoundError):
    """No dataset of that name, or no such version of it."""


class VersionPinnedError(DatahubError, RefusedError):
    """A job or a checkpoint needs the version."""


class PredicateInvalidError(DatahubError, InvalidConfigError):
    """The expression that chooses samples breaks a rule."""


class BlobDeletingError(DatahubError, RetryableError):
    """A blob is being deleted while results name it: put it again, and commit again."""


class CollectionStoppedError(DatahubError, RefusedError):
    """Garbage collection can't tell what is needed, so it deletes nothing."""


class SourceInvalidError(DatahubError, InvalidConfigError):
    """What a dataset shall be made from does not exist or has no known form."""


class SourceAwayError(DatahubError, EnvironmentFailedError):
    """A source's files can't be read now; that says nothing about the record."""


class IndexDamagedError(DatahubError, DataDamagedError):
    """Stored bytes of an index or a blob are missing, or do not fit their digest."""


class SampleDamagedError(IndexDamagedError):
    """The stored bytes of one sample do not fit their digest, or can't be decoded."""


class RegistryDamagedError(DatahubError, EnvironmentFailedError):
    """The registry's file is damaged: another try reads the same bytes."""


class RegistryFailedError(DatahubError, EnvironmentFailedError):
    """The registry's database did not answer within its bounded retries."""
