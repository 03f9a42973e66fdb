"""What tests of several folders share."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from tools.s3.server import BucketServer, serve

# Nothing here is measured by the clock: a machine may be as busy as it likes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Hypothesis's "ci" derandomizes: every run would try the same examples. Here the seed decides, and `make` takes it
# from the commit: a commit repeats its examples, so a failure repeats too, and the next commit tries others.
settings.register_profile("ci", settings.get_profile("untimed"), database=None, print_blob=True)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Print the seed of the property tests' examples with every failure."""
    seed = config.getoption("hypothesis_seed", None)
    if seed is not None and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"property tests drew their examples with --hypothesis-seed={seed}")


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """A real S3 server with a bucket called ``bucket``; one that can't be had fails its tests: nothing is skipped."""
    with serve(tmp_path_factory.mktemp("s3") / "buckets", buckets=("bucket",)) as server:
        yield server


@pytest.fixture
def bucket(
    bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """URL of a prefix of this test's own, in a bucket that this process and its children may use."""
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{tmp_path_factory.mktemp('prefix').name}"
