"""A real S3 server over a folder: versitygw, built once a user from the Go module that ``go/`` pins.

``S3_SERVER`` names a program instead. The server listens on loopback, with credentials made up for it.
"""

import contextlib
import fcntl
import hashlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "go"
PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
GIVEN = "S3_SERVER"
USUAL_S = 60
"""Cold build on two cores."""
READY_S_MAX = 20.0
STOP_S_MAX = 5.0
POLL_S = 0.05
HASH_CHARACTERS = 12


class ServerError(Exception):
    """The server can't be had; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketServer:
    """A server that runs."""

    environment: Mapping[str, str]
    """What a client finds it by, and may use it with."""
    folder: Path
    """Buckets are folders of this one, objects files of those."""


def program(environment: Mapping[str, str]) -> Path:
    """Return the path of the server's program, and build it if it is nowhere yet.

    Raises:
        ServerError: If Go is missing, or the build fails.
    """
    if environment.get(GIVEN):
        return Path(environment[GIVEN])
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache").expanduser()
    digest = hashlib.sha256((SOURCES / "go.mod").read_bytes() + (SOURCES / "go.sum").read_bytes())
    cache = Path(home, "polyreme", f"s3-{digest.hexdigest()[:HASH_CHARACTERS]}")
    built = cache / "versitygw"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built, environment)
    return built


def _build(built: Path, environment: Mapping[str, str]) -> None:
    if shutil.which("go", path=environment.get("PATH", "")) is None:
        raise ServerError(f"no Go on PATH to build an S3 server: install Go, or name a versitygw by {GIVEN}")
    print(f"building an S3 server into {built.parent}, once: about {USUAL_S} s", file=sys.stderr, flush=True)
    temporary = built.with_suffix(".partial")
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w"]
    variables = {**environment, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(
        [*command, "-o", str(temporary), PACKAGE], cwd=SOURCES, env=variables, stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise ServerError(f"go build of {PACKAGE} exited with {done.returncode}; it said why above")
    temporary.replace(built)


@contextlib.contextmanager
def serve(folder: Path, *, buckets: tuple[str, ...]) -> Iterator[BucketServer]:
    """Run a server with some buckets until the block ends.

    Raises:
        ServerError: If it can't be had, or does not get ready.
    """
    for bucket in buckets:
        (folder / bucket).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    credentials = {"ROOT_ACCESS_KEY": "tester", "ROOT_SECRET_KEY": "of-no-worth"}
    log = folder.parent / "s3.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program(os.environ), "--port", f"127.0.0.1:{port}", "posix", "--sidecar", _sidecar(folder), folder],
            env={**os.environ, **credentials},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(port, process, log)
        yield BucketServer(
            environment={
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": credentials["ROOT_ACCESS_KEY"],
                "AWS_SECRET_ACCESS_KEY": credentials["ROOT_SECRET_KEY"],
            },
            folder=folder,
        )
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)
        process.kill()
        process.wait()


def _sidecar(folder: Path) -> Path:
    """Where the server keeps what it knows of objects; beside them, for file systems without extended attributes."""
    sidecar = folder.parent / "s3-sidecar"
    sidecar.mkdir(exist_ok=True)
    return sidecar


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    limit_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < limit_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse()
            return
        time.sleep(POLL_S)
    raise ServerError(f"the S3 server is not ready after {READY_S_MAX} s, see {log}")
