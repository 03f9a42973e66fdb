"""One home a session, so that data is processed once; one undisturbed run, whose losses are the truth."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator

import pytest

from tests.e2e.polyreme_home import STEPS, PolyremeHome

SEED_VARIABLE = "POLYREME_E2E_SEED"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolyremeHome]:
    """A home."""
    opened = PolyremeHome(tmp_path_factory.mktemp("home"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def truth(home: PolyremeHome) -> dict[int, str]:
    """Losses of an undisturbed run."""
    serving = home.start(home.write_job("undisturbed"))
    ended = serving.end()
    assert ended.code == 0, ended.said
    losses = home.losses("undisturbed")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture
def draw() -> random.Random:
    """What chooses where a test strikes; a failed test shows its seed, the variable brings it back."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)
