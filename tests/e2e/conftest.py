"""One home for all tests, so that data is processed once; one undisturbed run, whose losses are the truth.

Processes of pytest-xdist share them, with ``--dist loadfile``: the name of a job or dataset belongs to one module.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.polyreme_home import STEPS, PolyremeHome

SEED_VARIABLE = "POLYREME_E2E_SEED"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all processes of this session."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def home(shared: Path) -> Iterator[PolyremeHome]:
    """A home."""
    (shared / "home").mkdir(exist_ok=True)
    opened = PolyremeHome(shared / "home")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def truth(home: PolyremeHome, shared: Path) -> dict[int, str]:
    """Losses of an undisturbed run, which the first process that needs them trains."""
    kept = shared / "truth.json"
    with (shared / "truth.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            ended = home.start(home.write_job("undisturbed")).end()
            assert ended.code == 0, ended.said
            kept.write_text(json.dumps(home.losses("undisturbed")))
    losses = {int(step): str(loss) for step, loss in json.loads(kept.read_text()).items()}
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture
def draw() -> random.Random:
    """What chooses where a test strikes; a failed test shows its seed, the variable brings it back."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)
