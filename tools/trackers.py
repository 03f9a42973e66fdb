"""TensorBoard and MLflow, each in an environment of its own, made once for each pinned version, and their servers.

The environments are under ``~/.cache/polyreme/trackers`` or POLYREME_TRACKERS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PINNED = Path(__file__).with_name("trackers.txt")
START_S_MAX = 240.0
LINES_SHOWN = 2000
"""Characters of a server's output that are shown when it does not start."""


def installed(name: str) -> Path:
    """Return the Python of a tool's environment."""
    (pinned,) = [line for line in PINNED.read_text().splitlines() if line.startswith(f"{name}==")]
    folder = Path(os.environ.get("POLYREME_TRACKERS") or Path.home() / ".cache/polyreme/trackers") / pinned
    python = folder / "bin/python"
    if not (folder / ".made").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        # TensorBoard imports pkg_resources, which later versions of setuptools lack.
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, pinned, "setuptools<80"], check=True)
        (folder / ".made").touch()
    return python


@dataclasses.dataclass
class TrackerServer:
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

    def arguments(self) -> list[str]:
        """Return what follows ``python -m``."""
        raise NotImplementedError

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
