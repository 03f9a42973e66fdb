"""The report on disk: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from polyreme.report.data import ReportData
from polyreme.report.page import build_report
from polyreme_api.errors import EnvironmentFailedError

REPORT_NAME = "report.html"


def write_report(directory: Path, data: ReportData) -> Path:
    """Write the report into a folder, which is made when it is missing.

    Returns:
        The file, ``report.html``.

    Raises:
        EnvironmentFailedError: If the disk does not take it; the report that was there is unchanged.
    """
    path = directory / REPORT_NAME
    temporary = directory / f".{REPORT_NAME}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(build_report(data))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise EnvironmentFailedError(f"report not written: {path}, {error.strerror or error}") from error
    return path
