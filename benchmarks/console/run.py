"""``make bench-console``: pages of the console on many runs, beside MLflow and TensorBoard in the same browser.

A home of so many runs is written with one job each, whose parameters differ as those of a sweep do; the console reads
them into its index, and then answers the first table, tables that are sorted and filtered by a parameter, and a
comparison, one request after another. Its index is kept apart from the time of answers: ``index_s``.

Then Chromium opens pages, each in a window without a cache, until what one came for is seen: the first table and a
comparison of 100 runs beside MLflow's with the same runs, and a curve of many steps beside TensorBoard's.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import html
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import ClientSession, DummyCookieJar

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.console import peers
from benchmarks.console.browser import Browser, Look, browser
from benchmarks.console.homes import COMPARED, LONG, SWEPT, write_long, write_runs

from polyreme_api.exit_codes import ExitCode

BAR = {"p99_ms": 200, "rss_mib": 150, "page_gzipped_kib": 60}
PEER_BAR = {
    "first_table_over_mlflow_ratio": 0.2,
    "first_table_bytes_over_mlflow_ratio": 0.1,
    "compare_over_mlflow_ratio": 0.1,
    "curve_over_tensorboard_ratio": 0.3,
}
LOOKS_MAX = 10_000
"""Looks at the table until all runs are in it, five a second."""
COMPARE = "/compare?" + "&".join(f"run=default/run-{number}" for number in range(COMPARED))
PATHS = {
    "first_table": "/",
    "next_page": "/?page=40",
    "sorted_by_parameter": f"/?sort={quote(f'{SWEPT}[7]')}&order=up",
    "filtered": f"/?where={quote(f'{SWEPT}[3]=1')}",
    "named": "/?text=run-77",
    "compare": "/compare?" + "&".join(f"run=default/run-{number}" for number in range(2)),
}
ROWS = "document.querySelectorAll('tbody tr').length > 20"
LINE = "document.querySelector('main svg polyline') !== null"
MLFLOW_ROWS = "document.querySelectorAll('a[href*=\"/runs/\"]').length > 5"
MLFLOW_COMPARED = "document.body.innerText.includes('Comparing 100 Runs')"
TENSORBOARD_LINE = (
    "document.querySelector('scalar-card') !== null && "
    "performance.getEntriesByType('resource').some(each => each.name.includes('timeSeries') && each.responseEnd > 0)"
)


def main() -> int:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--parameters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--looks", type=int, default=5, help="windows that are opened for a page")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the long curve")
    parser.add_argument("--ours-only", action="store_true", help="open no browser and start no peer")
    options = parser.parse_args()
    bar = BAR if options.ours_only else BAR | PEER_BAR
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        write_runs(home, options.runs, options.parameters)
        figures = asyncio.run(_measure(home, options.runs, options.rounds))
        if not options.ours_only:
            figures |= _beside(Path(folder), home, options)
    figures |= {"runs": options.runs, "parameters": options.parameters}
    ok = all(figures[name] <= most for name, most in bar.items())
    shown = {name: f"<= {most}" for name, most in bar.items()}
    sys.stdout.write(json.dumps({"name": "bench-console", "figures": figures, "bar": shown, "ok": ok}) + "\n")
    return ExitCode.OK if ok else ExitCode.RUN_FAILED


def _command(home: Path) -> list[str]:
    return [sys.executable, "-m", "polyreme.main", "--home", str(home), "console", "--port", "0"]


async def _measure(home: Path, runs: int, rounds: int) -> dict[str, Any]:
    server = await asyncio.create_subprocess_exec(*_command(home), stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        await server.stdout.readline()
        link = (await server.stdout.readline()).decode().strip()
        return await _ask(link, server.pid, runs, rounds)
    finally:
        server.terminate()
        await server.wait()


async def _ask(link: str, pid: int, runs: int, rounds: int) -> dict[str, Any]:
    base = link.partition("/start")[0]
    async with ClientSession(
        cookie_jar=DummyCookieJar(), auto_decompress=False, headers={"Accept-Encoding": "gzip"}
    ) as session:
        async with session.get(link, allow_redirects=False) as response:
            headers = {"Cookie": response.headers["Set-Cookie"].partition(";")[0]}
        began_s = time.monotonic()
        for _ in range(LOOKS_MAX):
            if f"of {runs:,} runs" in await _page(session, base, headers):
                break
            await asyncio.sleep(0.2)
        figures: dict[str, Any] = {"index_s": round(time.monotonic() - began_s, 1)}
        every, body = list[float](), b""
        for name, path in PATHS.items():
            took_ms = []
            for _ in range(rounds):
                asked_s = time.monotonic()
                async with session.get(base + path, headers=headers) as response:
                    body = await response.read()
                    assert response.status == 200, (path, response.status)
                took_ms.append(1000 * (time.monotonic() - asked_s))
            _check(name, gzip.decompress(body).decode())
            every += took_ms
            figures[f"{name}_ms"] = round(sorted(took_ms)[len(took_ms) // 2], 1)
            if name == "first_table":
                figures["page_gzipped_kib"] = round(len(body) / 1024, 1)
        figures["p99_ms"] = round(sorted(every)[min(len(every) - 1, int(len(every) * 0.99))], 1)
    figures["rss_mib"] = _rss_mib(pid)
    return figures


def _check(name: str, page: str) -> None:
    """Refuse to time a page that does not show what it is for."""
    wanted = {"first_table": f"{SWEPT}[3]", "sorted_by_parameter": f"{SWEPT}[7]", "named": "run-77"}.get(name, "run-")
    shown = html.unescape(page)
    if shown.count("<tr") < 2 or wanted not in shown:
        raise SystemExit(f"the page {name} has no {wanted}")


async def _page(session: ClientSession, base: str, headers: dict[str, str]) -> str:
    async with session.get(base + "/", headers=headers) as response:
        return gzip.decompress(await response.read()).decode()


def _rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def _beside(folder: Path, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Open the same pages of ours and of the peers; the index of the home has been read by now."""
    write_long(home, options.steps)
    peers.write_events(folder, options.steps)
    with browser() as opened, subprocess.Popen(_command(home), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        link = next(line.strip() for line in server.stdout if "/start?" in line)
        try:
            return _looks(opened, folder, link, server.pid, options)
        finally:
            server.terminate()


def _looks(opened: Browser, folder: Path, link: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    base, cookies = link.partition("/start")[0], opened.session(link)

    def ours(path: str, until: str) -> Look:
        return opened.look(base + path, until=until, cookies=cookies)

    with peers.mlflow(folder, options.runs, options.parameters) as url:
        table = _pair(lambda: ours("/", ROWS), lambda: opened.look(url + peers.TABLE, until=MLFLOW_ROWS), options.looks)
        compare = _pair(
            lambda: ours(COMPARE, LINE),
            lambda: opened.look(url + peers.compare_path(), until=MLFLOW_COMPARED),
            options.looks,
        )
    path = f"/runs/default/{LONG}"
    first = ours(path, LINE)
    with peers.tensorboard(folder, options.steps) as (url, load_s):
        curve = _pair(
            lambda: ours(path, LINE),
            lambda: opened.look(f"{url}/#timeseries", until=TENSORBOARD_LINE),
            options.looks,
        )
    return {
        **_figures("first_table", "mlflow", table),
        **_figures("compare", "mlflow", compare),
        **_figures("curve", "tensorboard", curve),
        "first_curve_s": round(first.seconds, 2),
        "tensorboard_load_s": round(load_s, 2),
        "steps": options.steps,
        "rss_after_curve_mib": _rss_mib(pid),
    }


def _pair(ours: Callable[[], Look], peer: Callable[[], Look], looks: int) -> list[tuple[Look, Look]]:
    """Open both in turn, once before it counts."""
    return [(ours(), peer()) for _ in range(looks + 1)][1:]


def _figures(name: str, peer: str, pairs: list[tuple[Look, Look]]) -> dict[str, float]:
    own_s, peer_s = (statistics.median(pair[at].seconds for pair in pairs) for at in (0, 1))
    own_kib, peer_kib = (statistics.median(pair[at].kib for pair in pairs) for at in (0, 1))
    return {
        f"{name}_s": round(own_s, 3),
        f"{name}_{peer}_s": round(peer_s, 3),
        f"{name}_over_{peer}_ratio": round(own_s / peer_s, 3),
        f"{name}_kib": round(own_kib, 1),
        f"{name}_{peer}_kib": round(peer_kib, 1),
        f"{name}_bytes_over_{peer}_ratio": round(own_kib / peer_kib, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
