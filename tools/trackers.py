"""TensorBoard and MLflow, each in an environment of its own, and their servers."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import http.client
import os
import socket
import subprocess
import time
from pathlib import Path

from tools.environments import environment, pinned

PINNED = Path(__file__).with_name("trackers.txt")
START_S_MAX = 240.0
LINES_SHOWN = 2000
"""Characters of a server's output that are shown when it does not start."""


def installed(name: str) -> Path:
    """Return the Python of a tool's environment."""
    # TensorBoard imports pkg_resources, which later versions of setuptools lack.
    wanted = [line for line in pinned(PINNED) if line.startswith(f"{name}==")]
    return environment(f"tracker-{name}", [*wanted, "setuptools<80"])


@dataclasses.dataclass
class TrackerServer(abc.ABC):
    """The server of a tool, on a port of its own; its data outlives it.

    Args:
        python: Of the tool's environment.
        folder: Where its data and its output are.
        process: While it runs.
        port: Chosen at the first start.
    """

    python: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @abc.abstractmethod
    def arguments(self) -> list[str]:
        """Return what follows ``python -m``."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        output = self.folder / f"{type(self).__name__}.log"
        with output.open("ab") as log:
            command = [str(self.python), "-m", *self.arguments()]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        limit_s = time.monotonic() + START_S_MAX
        while time.monotonic() < limit_s and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S_MAX)
                with contextlib.closing(connection):
                    connection.request("GET", "/")
                    connection.getresponse()
                    return
            time.sleep(0.2)
        raise SystemExit(f"{type(self).__name__} does not start: {output.read_text()[-LINES_SHOWN:]}")

    def kill(self) -> None:
        """Kill it with its workers."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None


class MlflowServer(TrackerServer):
    """MLflow with a SQLite database in the folder."""

    @property
    def database(self) -> Path:
        """Its file."""
        return self.folder / "mlflow.db"

    def arguments(self) -> list[str]:
        """Return what follows ``python -m``."""
        stored = ["--backend-store-uri", f"sqlite:///{self.database}"]
        stored += ["--default-artifact-root", str(self.folder / "artifacts")]
        return ["mlflow", "server", "--workers", "1", *stored, "--port", str(self.port)]


class TensorBoardServer(TrackerServer):
    """TensorBoard of the event files under ``events`` in the folder."""

    @property
    def events(self) -> Path:
        """Folder with a folder for each run."""
        return self.folder / "events"

    def arguments(self) -> list[str]:
        """Return what follows ``python -m``."""
        return ["tensorboard.main", "--logdir", str(self.events), "--host", "127.0.0.1", "--port", str(self.port)]
