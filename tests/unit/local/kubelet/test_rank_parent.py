"""The launcher's side of the fork server, by itself: many ranks at once, a fork server that can't warm."""

import asyncio
import os
from pathlib import Path

import pytest

from polyreme_api.errors import EnvironmentFailedError
from polyreme_launcher.rank_processes import ALLOCATOR, FORK_SERVER_DEATHS_MAX, RankParent, with_torch_settings

pytestmark = pytest.mark.slow

RANKS = 64
ENVIRONMENT = {"PATH": os.environ["PATH"], "POLYREME_RANK_TARGET": "gc:disable"}


async def test_sixty_four_ranks_are_forked_by_a_fork_server_that_still_warms(tmp_path: Path) -> None:
    ended: dict[int, int | None] = {}
    failures: list[EnvironmentFailedError] = []
    parent = RankParent(
        environment=ENVIRONMENT,
        on_exit=lambda attempt, rank, code, number, said: ended.update({rank: code}),
        on_forked=lambda: None,
        on_fail=failures.append,
    )
    parent.start()
    fork_server = parent.fork_server_pid
    output = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    # More than a socket takes at once, before anyone reads.
    for rank in range(RANKS):
        large = {**ENVIRONMENT, "LARGE": "x" * 20_000}
        parent.fork(attempt=1, rank=rank, environment=large, output=output, descriptors={})
    async with asyncio.timeout(60):
        while len(ended) < RANKS:
            await asyncio.sleep(0.01)
    os.close(output)
    assert set(ended.values()) == {0}
    assert parent.fork_server_pid == fork_server
    await parent.close()
    assert failures == []


async def test_a_fork_server_that_can_not_warm_says_why_and_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    failures: list[EnvironmentFailedError] = []
    parent = RankParent(
        environment={**ENVIRONMENT, "POLYREME_RANK_TARGET": "no_such_module:main"},
        on_exit=lambda attempt, rank, code, number, message: said.append(message),
        on_forked=lambda: None,
        on_fail=failures.append,
    )
    parent.start()
    with (tmp_path / "log").open("wb") as log:
        parent.fork(attempt=1, rank=0, environment=ENVIRONMENT, output=log.fileno(), descriptors={})
    async with asyncio.timeout(60):
        while not failures:
            await asyncio.sleep(0.01)
    assert said == [
        "the ranks' parent process died: ModuleNotFoundError: No module named 'no_such_module'",
    ]
    assert f"died {FORK_SERVER_DEATHS_MAX} times" in str(failures[0])
    assert "no_such_module" in str(failures[0])
    await parent.close()


def test_ranks_keep_freed_memory_unless_the_pod_says_otherwise() -> None:
    """glibc reads its settings when the fork server starts: what its kernel says it was started with is what counts."""

    async def started_with(environment: dict[str, str]) -> dict[str, str]:
        parent = RankParent(
            environment=environment, on_exit=lambda *_: None, on_forked=lambda: None, on_fail=lambda _: None
        )
        parent.start()
        environ = Path(f"/proc/{parent.fork_server_pid}/environ")
        async with asyncio.timeout(60):
            # A kernel shows it empty for a moment in the middle of exec.
            while not (told := environ.read_text()):
                await asyncio.sleep(0.01)
        await parent.close()
        return dict(variable.split("=", 1) for variable in told.split("\0") if variable)

    assert ALLOCATOR.items() <= asyncio.run(started_with(ENVIRONMENT)).items()
    own = {"MALLOC_TRIM_THRESHOLD_": "65536"}
    seen = asyncio.run(started_with(ENVIRONMENT | own))
    assert ALLOCATOR | own == {name: value for name, value in seen.items() if name.startswith("MALLOC_")}


def test_torch_is_set_up_for_devices_unless_the_pod_says_otherwise() -> None:
    seen = with_torch_settings({"POD": "p"}, Path("/pod"))
    assert seen["POD"] == "p"
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["TORCH_FR_DUMP_TEMP_FILE"] == "/pod/exchanges-of-rank-"
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    seen = with_torch_settings(own, Path("/pod"))
    assert "PYTORCH_ALLOC_CONF" not in seen
    assert own.items() <= seen.items()
