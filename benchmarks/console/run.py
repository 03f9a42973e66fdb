"""``make bench-console``: pages of the console on many runs: time to answer, bytes, memory of the server.

A home of so many runs is written with one job each, whose parameters differ as those of a sweep do; the console reads
them into its index, and then answers the first table, tables that are sorted and filtered by a parameter, and a
comparison, one request after another. Its index is kept apart from the time of answers: ``index_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientSession, DummyCookieJar

from polyreme_api.exit_codes import ExitCode

BAR = {"p99_ms": "< 200", "rss_mib": "< 150", "page_gzipped_kib": "<= 60"}
LOOKS_MAX = 10_000
"""Looks at the table until all runs are in it, five a second."""
PATHS = {
    "first_table": "/",
    "next_page": "/?page=40",
    "sorted_by_parameter": "/?sort=training.p7&order=up",
    "filtered": "/?where=training.p3%3D1",
    "named": "/?text=run-77",
    "compare": "/compare?" + "&".join(f"run=default/run-{number}" for number in range(2)),
}


def main() -> int:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--parameters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        _write_home(home, options.runs, options.parameters)
        figures = asyncio.run(_measure(home, options.runs, options.rounds))
    figures |= {"runs": options.runs, "parameters": options.parameters}
    ok = figures["p99_ms"] < 200 and figures["rss_mib"] < 150 and figures["page_gzipped_kib"] <= 60
    sys.stdout.write(json.dumps({"name": "bench-console", "figures": figures, "bar": BAR, "ok": ok}) + "\n")
    return ExitCode.OK if ok else ExitCode.RUN_FAILED


def _write_home(home: Path, runs: int, parameters: int) -> None:
    for number in range(runs):
        run = home / "runs" / "default" / f"run-{number}"
        run.mkdir(parents=True)
        values = {f"p{at}": number >> at % 8 & 3 if at % 12 == 7 or at % 12 == 3 else at for at in range(parameters)}
        job = {"metadata": {"name": run.name}, "spec": {"training": values}}
        state = {"state": "Succeeded", "finished": True, "step": 100, "steps": 100, "loss": 1 / (number + 1)}
        identity = {"namespace": "default", "name": run.name, "uid": str(number)}
        (run / "job.yaml").write_text(yaml.dump(job, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
        (run / "state.json").write_text(json.dumps(state))
        (run / "run.json").write_text(json.dumps(identity))


async def _measure(home: Path, runs: int, rounds: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "polyreme.main", "--home", str(home), "console", "--port", "0"]
    server = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
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
            every += took_ms
            figures[f"{name}_ms"] = round(sorted(took_ms)[len(took_ms) // 2], 1)
            if name == "first_table":
                figures["page_gzipped_kib"] = round(len(body) / 1024, 1)
        figures["p99_ms"] = round(sorted(every)[min(len(every) - 1, int(len(every) * 0.99))], 1)
    status = Path(f"/proc/{pid}/status").read_text()
    figures["rss_mib"] = int(status.partition("VmRSS:")[2].split()[0]) // 1024
    return figures


async def _page(session: ClientSession, base: str, headers: dict[str, str]) -> str:
    async with session.get(base + "/", headers=headers) as response:
        return gzip.decompress(await response.read()).decode()


if __name__ == "__main__":
    sys.exit(main())
