"""A real S3 server over a folder: versitygw, built once a user from the Go module that ``go/`` pins.

``S3_SERVER`` names a program instead. The server listens on loopback, with credentials made up for it.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.build_cache import BuildError, built, cache_folder, say
from tools.cluster.servers import LOOPBACK, Certificate, Server, Servers, free_ports, is_listening
from tools.services.guard import held

SOURCES = Path(__file__).parent / "go"
PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
GIVEN = "S3_SERVER"
USUAL_S = 60
"""Cold build on two cores."""
READY_S_MAX = 20.0
ATTRIBUTES_NAME = "s3-attributes"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketServer:
    """A server that runs."""

    environment: Mapping[str, str]
    """What a client finds it by, and may use it with."""
    folder: Path
    """Buckets are folders of this one, objects files of those."""


class Buckets:
    """One server; started again, it has the same port and credentials, and the objects that it had.

    Args:
        folder: Folder of the buckets; what the server keeps beside the objects is next to it.
        servers: Those that this one belongs to.
        buckets: Names of the buckets to make.
        host: Address that it listens on.
        certificate: With one it speaks HTTPS.
        secret: Its secret key; made up for it by default.
    """

    def __init__(
        self,
        folder: Path,
        servers: Servers,
        buckets: tuple[str, ...],
        *,
        host: str = LOOPBACK,
        certificate: Certificate | None = None,
        secret: str = "",
    ) -> None:
        self._folder, self._servers, self._buckets, self._host = folder, servers, buckets, host
        self._certificate = certificate
        (self._port,) = free_ports(1, host=host)
        self._credentials = {"ROOT_ACCESS_KEY": "polyreme", "ROOT_SECRET_KEY": secret or secrets.token_urlsafe(24)}
        self._server: Server | None = None

    def start(self) -> None:
        """Start it."""
        # Attributes of objects are files beside them, for file systems without extended attributes.
        sidecar = self._folder.with_name(ATTRIBUTES_NAME)
        for path in (sidecar, *(self._folder / bucket for bucket in self._buckets)):
            path.mkdir(parents=True, exist_ok=True)
        tls = self._certificate
        self._server = self._servers.start(
            "s3",
            [
                program(os.environ),
                "--quiet",
                f"--port={self._host}:{self._port}",
                *([] if tls is None else [f"--cert={tls.path}", f"--key={tls.key}"]),
                "posix",
                f"--sidecar={sidecar}",
                self._folder,
            ],
            environment={**os.environ, **self._credentials},
        )

    def wait(self) -> dict[str, str]:
        """Wait for the server; return the variables that a client finds it by, and may use it with."""
        assert self._server is not None
        self._servers.wait(
            self._server,
            lambda: is_listening(self._port, host=self._host),
            what="the S3 server's answer",
            timeout_s=READY_S_MAX,
        )
        return {
            "AWS_ENDPOINT_URL": f"http{'s' if self._certificate else ''}://{self._host}:{self._port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self._credentials["ROOT_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": self._credentials["ROOT_SECRET_KEY"],
        }


@contextlib.contextmanager
def serve(folder: Path, *, buckets: tuple[str, ...]) -> Iterator[BucketServer]:
    """Run a server with some buckets until the block, or this process, ends.

    Raises:
        BuildError: If it can't be had.
        ServerError: If it does not get ready.
    """
    with held(folder.parent) as servers:
        server = Buckets(folder, servers, buckets)
        server.start()
        yield BucketServer(environment=server.wait(), folder=folder)


def program(environment: Mapping[str, str]) -> Path:
    """Return the path of the server's program, and build it if it is nowhere yet.

    Raises:
        BuildError: If Go is missing, or the build fails.
    """
    if environment.get(GIVEN):
        return Path(environment[GIVEN])
    cache = cache_folder(environment, "s3", [(SOURCES / name).read_bytes() for name in ("go.mod", "go.sum")])
    path = cache / "versitygw"
    return built(path, lambda: _build(path, environment))


def _build(path: Path, environment: Mapping[str, str]) -> None:
    if shutil.which("go", path=environment.get("PATH", "")) is None:
        raise BuildError(f"no Go on PATH to build an S3 server: install Go, or name a versitygw by {GIVEN}")
    say(f"building an S3 server into {path.parent}, once: about {USUAL_S} s")
    temporary = path.with_suffix(".partial")
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w"]
    variables = {**environment, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(
        [*command, "-o", str(temporary), PACKAGE], cwd=SOURCES, env=variables, stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"go build of {PACKAGE} exited with {done.returncode}; it said why above")
    temporary.replace(path)
