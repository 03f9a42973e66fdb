"""Gangs of real ranks for the tests of this folder; one warm parent per session."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.attempts import begin, history
from tests.parallel.gangs import Gang, Start, start_gang, warm


@pytest.fixture(scope="session")
def _warm() -> Any:
    return warm()


@pytest.fixture(scope="session")
def turn_number(pytestconfig: pytest.Config) -> int:
    """Number that chooses the layout whose turn it is: of the commit, as the seed of the property tests is.

    ``POLYREME_GRID_TURN`` is another one.
    """
    seed = str(pytestconfig.getoption("hypothesis_seed", None))
    return int(os.environ.get("POLYREME_GRID_TURN") or zlib.crc32(seed.encode()))


@pytest.fixture
def start(_warm: Any, tmp_path: Path) -> Iterator[Start]:
    """Start a gang; all gangs of the test are ended with it."""
    gangs: list[Gang] = []

    def begin(body: str, *, layout: tuple[int, int] | dict[str, int], root: Path | None = None, **request: Any) -> Gang:
        gangs.append(start_gang(_warm, body, layout=layout, root=root or tmp_path, **request))
        return gangs[-1]

    yield begin
    for gang in gangs:
        gang.kill()


@pytest.fixture(scope="session")
def undisturbed(_warm: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that nothing disturbs."""
    root = tmp_path_factory.mktemp("undisturbed")

    def start(body: str, *, layout: tuple[int, int] | dict[str, int], root: Path, **request: Any) -> Gang:
        return start_gang(_warm, body, layout=layout, root=root, **request)

    gang = begin(start, root, 1)
    assert gang.wait() == [0] * 4, gang.logs()
    return history(root)
