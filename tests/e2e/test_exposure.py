"""What a run shows to others on its machine: no port beyond loopback, no secret in a log, a file, a command line."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import psutil
import pytest

from tests.e2e.polyreme_home import PolyremeHome, proportional_bytes, unless_gone

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

MEMORY_BYTES_MAX = 4_000_000_000


def readable_by_others(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def listening(process: psutil.Process) -> list[str]:
    return [at.laddr.ip for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN]


def test_a_run_listens_on_loopback_alone_shows_no_secret_and_needs_less_than_four_gigabytes(
    home: PolyremeHome,
) -> None:
    serving = home.start(home.write_job("exposed"))
    serving.until(lambda: serving.committed(1), "a checkpoint is committed")
    # Held still, or a fast machine trains the last steps while it is looked at: then it listens nowhere any more.
    with serving.held(attempt=1, steps=1):
        tree = serving.tree()
        seen = [(unless_gone(process.cmdline), unless_gone(process.environ), process) for process in tree]
        addresses = [address for process in tree for address in unless_gone(lambda: listening(process)) or []]  # noqa: B023
        memory_bytes = proportional_bytes(tree)
        folders = [serving.pod_directory(index) for index in (0, 1)]
        secrets = {(folder / name).read_bytes() for folder in folders for name in ("secret", "token")}
    assert serving.end().code == 0

    print(f"{len(tree)} processes, {memory_bytes / 2**20:.0f} MiB, listening at {addresses}")
    assert len(addresses) >= 2, "the API's and the leader's ports at least were looked at"
    assert set(addresses) == {"127.0.0.1"}
    assert 0 < memory_bytes < MEMORY_BYTES_MAX

    forms = {form for secret in secrets for form in forms_of(secret)}
    shown = [(commands, variables) for commands, variables, _ in seen]
    assert not [form for form in forms if form.decode(errors="replace") in str(shown)]
    # Other runs share the home: their files come and go.
    files = [Path(folder) / name for folder, _, names in os.walk(home.path) for name in names]
    holding = [path for path in files if holds(path, forms)]
    assert {path.name for path in holding} <= {"secret", "token", "cluster.journal"}
    assert not [path for path in holding if readable_by_others(path)]
    # The run's token, which identifies leftovers, is no key, but no other user should read it.
    assert re.search(r"\"token\": \"\w{32}\"", serving.run.identity_file.read_text())
    assert not readable_by_others(serving.run.identity_file)


def forms_of(secret: bytes) -> set[bytes]:
    """The ways in which bytes get into text."""
    import base64

    assert len(secret) >= 16
    return {secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret)[2:-1].encode()}


def holds(path: Path, forms: set[bytes]) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return any(form in content for form in forms)
