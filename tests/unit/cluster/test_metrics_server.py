"""Who may read the metrics, over a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from polyreme_cluster.metrics_server import (
    ALLOWED_FRESH_S,
    DENIED_FRESH_S,
    TOKENS_MAX,
    CachedReviewer,
    ReviewError,
    serve,
)
from polyreme_operator.publishing.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def steady_s(self) -> float:
        return self.at_s

    async def sleep(self, delay_s: float) -> None:
        self.at_s += delay_s


class Table:
    """Answers by token, and how often it was asked."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.asked = codes, 0

    async def verdict(self, token: str) -> int:
        self.asked += 1
        await asyncio.sleep(0)
        if token == "down":
            raise ReviewError("no answer")
        return self.codes.get(token, 401)


@contextlib.asynccontextmanager
async def served(reviewer: Table | None, *, ready: bool = True) -> AsyncIterator[str]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    metrics = Metrics()
    metrics.leads(True)
    task = asyncio.ensure_future(
        serve(metrics, host="127.0.0.1", port=0, reviewer=reviewer, is_ready=lambda: ready, started=port.set_result)
    )
    try:
        yield f"http://127.0.0.1:{await port}"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def get(url: str, authorization: str | None = None) -> tuple[int, str]:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, 401),
        ("", 401),
        ("Bearer ", 401),
        ("Basic yes", 401),
        ("Bearer nobody", 401),
        ("Bearer " + "x" * 20_000, 400),
        ("Bearer no", 403),
        ("Bearer down", 503),
        ("Bearer yes", 200),
        ("bearer yes", 200),
    ],
)
async def test_metrics_need_authorization(authorization: str | None, code: int) -> None:
    async with served(Table(yes=200, no=403)) as url:
        seen, text = await get(f"{url}/metrics", authorization)
        assert seen == code
        assert ("polyreme_leader 1.0" in text) == (code == 200)


async def test_probes_need_no_token() -> None:
    async with served(Table(), ready=False) as url:
        assert await get(f"{url}/healthz") == (200, "ok\n")
        assert await get(f"{url}/readyz") == (503, "not ready\n")
        assert (await get(f"{url}/anything"))[0] == 404
    async with served(None) as url:
        assert await get(f"{url}/readyz") == (200, "ok\n")
        assert (await get(f"{url}/metrics"))[0] == 200


async def test_answers_are_kept_briefly_and_a_no_for_less_long() -> None:
    table, clock = Table(yes=200, no=403), Clock()
    cached = CachedReviewer(table, clock)
    for _ in range(3):
        assert await cached.verdict("yes") == 200
        assert await cached.verdict("no") == 403
    assert table.asked == 2
    clock.at_s = DENIED_FRESH_S + 1
    table.codes["no"] = 200
    assert await cached.verdict("no") == 200
    assert await cached.verdict("yes") == 200
    assert table.asked == 3
    clock.at_s = ALLOWED_FRESH_S + 1
    table.codes["yes"] = 401
    assert await cached.verdict("yes") == 401


async def test_no_answer_is_not_kept_and_the_memory_is_bounded() -> None:
    table, clock = Table(), Clock()
    cached = CachedReviewer(table, clock)
    for _ in range(2):
        with pytest.raises(ReviewError):
            await cached.verdict("down")
    assert table.asked == 2
    for number in range(TOKENS_MAX + 1):
        await cached.verdict(f"t{number}")
    asked = table.asked
    await cached.verdict(f"t{TOKENS_MAX}")
    assert table.asked == asked
    await cached.verdict("t0")
    assert table.asked == asked + 1
