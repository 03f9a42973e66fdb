"""Load of ranks on a bucket: requests and bytes for one engine, for eight on one machine, and for eight machines.

Then three machines have a budget; one is killed, and the server refuses requests for a second.

Usage: run.py [--images 2400] [--epochs 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme_api import environment as names
from polyreme_api.job import parse_job
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key
from polyreme_datahub.index.format import Manifest
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.loader.read.part_files import PART_BYTES
from polyreme_datahub.objects import open_store
from tools.services.services import shared

HERE = Path(__file__).parent
IMAGE_PX, QUALITY = 256, 92
PACK_TOKENS, PACKS, JOB = 1_024, 8, "origin"
ENGINES = 8
BARS = {"gets_per_part_ratio": 1.1, "eight_engine_bytes_ratio": 1.2, "budget_peak_ratio": 1.0}
BUDGET = {"requestsPerSecond": 120, "bytesPerSecond": 48 * 2**20}
BUDGET_ENGINES = 3
KILLED_AFTER_S, STORM_AFTER_S, STORM_S, WINDOW_S = 2.5, 4.0, 1.0, 1.0
LIMIT_S = 300.0
READ_BYTES = 1 << 18
METHODS = (b"GET", b"HEAD", b"PUT", b"POST", b"DELETE")
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class CountingProxy:
    """Passes connections on to a server, and counts its GETs and answered bytes by object.

    Args:
        host: The server.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._there = (host, port)
        self.gets: Counter[str] = Counter()
        self.answered_bytes: Counter[str] = Counter()
        self.requests_s: list[float] = []
        self.passed: list[tuple[float, int]] = []
        """When answers passed, and how many bytes."""
        self.refusing = False
        self.port = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[int]:
        """Serve in a thread of its own; gives the port."""
        loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await asyncio.Event().wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(_until_cancelled(serve())), daemon=True)
        thread.start()
        ready.wait()
        yield self.port
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return the counts, and reset them."""
        found = self.gets, self.answered_bytes
        self.gets, self.answered_bytes = Counter(), Counter()
        self.requests_s, self.passed = [], []
        return found

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._there)
        asked = [""]
        await asyncio.gather(self._ask(reader, there_writer, writer, asked), self._answer(there_reader, writer, asked))

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
        asked: list[str],
    ) -> None:
        # A client sends its next request when the answer to the one before has come.
        while data := await _read(reader):
            if data.partition(b" ")[0] in METHODS:
                self.requests_s.append(time.monotonic())
                if self.refusing:
                    back.write(REFUSAL)
                    await back.drain()
                    continue
            if data.startswith(b"GET "):
                asked[0] = data.split(b" ", 2)[1].decode().partition("?")[0]
                self.gets[asked[0]] += 1
            elif data[:5] in {b"HEAD ", b"PUT /", b"POST "}:
                asked[0] = ""
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[str]) -> None:
        while data := await _read(reader):
            self.answered_bytes[asked[0]] += len(data)
            self.passed.append((time.monotonic(), len(data)))
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
        writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read(READ_BYTES)
    return b""


async def _until_cancelled(work: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await work


def main() -> int:
    """Measure, and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2_400)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        variables = dict(stack.enter_context(shared(place / "services", ("s3",))))
        os.environ.update(variables)
        there = urlsplit(variables["AWS_ENDPOINT_URL"])
        proxy = CountingProxy(str(there.hostname), int(there.port or 80))
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{stack.enter_context(proxy.running())}"
        figures = measure(place, proxy, variables["POLYREME_OBJECTS_URL"], options.images, options.epochs)
    ok = all(figures[name] <= bar for name, bar in BARS.items())
    print(json.dumps({"name": "bench-loader-origin", "figures": figures, "bar": BARS, "ok": ok}))
    return 0 if ok else 1


def measure(place: Path, proxy: CountingProxy, objects: str, images: int, epochs: int) -> dict[str, float]:
    """Process the images once, then read them by one engine, by eight of one machine, and by eight machines."""
    registry = f"sqlite:///{place}/registry.sqlite"
    hub.register(registry, objects, "noise", write_images(place / "images", images))
    spec = parse_job(job_of(1)).spec
    report = hub.process(spec, registry_url=registry, objects_url=objects, job=JOB)
    manifest = Manifest.from_bytes(Lakehouse(open_store(objects)).get_blob(report.datasets[0].manifest))
    steps = max(1, round(epochs * manifest.tokens / (PACK_TOKENS * PACKS)))
    sizes = {blob_key(digest): size for digest, size in manifest.sample_shards.items()}
    given = place / "given.json"
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    given.write_text(json.dumps({"objects": objects, "spec": dumped, "job": JOB, "steps": steps}))
    parts = sum(-(-size // PART_BYTES) for size in sizes.values())
    figures: dict[str, float] = {
        "shards": len(sizes),
        "parts": parts,
        "mib": sum(sizes.values()) / 2**20,
        "steps": steps,
    }
    cases = {"one_engine": (1, False), "eight_engine": (ENGINES, False), "eight_machine": (ENGINES, True)}
    for case, (engines, apart) in cases.items():
        proxy.take()
        read, first_batch_s = run_engines(given, [place / f"{case}-{at if apart else 0}" for at in range(engines)])
        gets, answered = proxy.take()
        figures[f"{case}_samples"] = read
        figures[f"{case}_first_batch_s"] = first_batch_s
        figures[f"{case}_gets_ratio"] = sum(of(gets, sizes)) / parts
        figures[f"{case}_bytes_ratio"] = sum(of(answered, sizes)) / sum(sizes.values())
        print(f"{case}: {figures}", file=sys.stderr)
    figures["gets_per_part_ratio"] = figures["one_engine_gets_ratio"]
    dumped["data"]["originBudget"], dumped["workers"]["replicas"] = BUDGET, BUDGET_ENGINES
    given.write_text(json.dumps({"objects": objects, "spec": dumped, "job": JOB, "steps": steps}))
    figures |= budgeted(given, proxy, [place / f"budget-{at}" for at in range(BUDGET_ENGINES)])
    return {name: round(value, 3) for name, value in figures.items()}


def of(counted: Counter[str], sizes: dict[str, int]) -> list[int]:
    """Return what was counted of the sample shards."""
    return [count for path, count in counted.items() if any(path.endswith(key) for key in sizes)]


def budgeted(given: Path, proxy: CountingProxy, caches: Sequence[Path]) -> dict[str, float]:
    """Read by machines with a budget; one of them is killed, and then the server refuses requests for a while."""
    proxy.take()
    begun_s = time.monotonic()
    running = [start(given, rank, len(caches), cache) for rank, cache in enumerate(caches)]
    time.sleep(KILLED_AFTER_S)
    running[-1].kill()
    time.sleep(STORM_AFTER_S - KILLED_AFTER_S)
    proxy.refusing = True
    time.sleep(STORM_S)
    proxy.refusing = False
    said = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    assert [process.returncode for process in running[:-1]] == [0] * (len(running) - 1), said
    peaks = (
        peak([(at_s, 1) for at_s in proxy.requests_s]) / BUDGET["requestsPerSecond"],
        peak(proxy.passed) / BUDGET["bytesPerSecond"],
    )
    spent_s = time.monotonic() - begun_s
    used = sum(size for _, size in proxy.passed) / BUDGET["bytesPerSecond"] / spent_s
    return {"budget_peak_ratio": max(peaks), "budget_requests_peak_ratio": peaks[0], "budget_used_ratio": used}


def peak(passed: Sequence[tuple[float, int]]) -> int:
    """Return the most of any second, wherever it begins."""
    most = total = first = 0
    for at_s, size in passed:
        total += size
        while passed[first][0] <= at_s - WINDOW_S:
            total -= passed[first][1]
            first += 1
        most = max(most, total)
    return most


def start(given: Path, rank: int, ranks: int, cache: Path) -> subprocess.Popen[str]:
    """Start one rank's engine."""
    return subprocess.Popen(
        [sys.executable, HERE / "reader.py", given, str(rank), str(ranks)],
        env={**os.environ, names.CACHE_DIRECTORY: str(cache), names.DATA_THREADS: "2"},
        stdout=subprocess.PIPE,
        text=True,
    )


def run_engines(given: Path, caches: Sequence[Path]) -> tuple[int, float]:
    """Run engines at once, each with its folder of local copies.

    Returns:
        Samples that they read, and the longest time from a source's opening to its first batch [s].
    """
    running = [start(given, rank, len(caches), cache) for rank, cache in enumerate(caches)]
    said = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    assert all(process.returncode == 0 for process in running), said
    found = [json.loads(line) for line in said]
    return sum(of["samples"] for of in found), max(of["first_batch_s"] for of in found)


def write_images(folder: Path, count: int) -> Path:
    """Write noisy JPEGs of some 50 KB, and their records."""
    folder.mkdir()
    lines = []
    for at in range(count):
        pixels = np.random.default_rng(at).integers(0, 255, (IMAGE_PX, IMAGE_PX, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
        (folder / f"{at}.jpg").write_bytes(buffer.getvalue())
        turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": f"Noise {at}."}]
        lines.append(json.dumps({"id": f"r{at}", "images": [f"{at}.jpg"], "conversations": turns}))
    path = folder / "noise.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def job_of(steps: int) -> dict[str, Any]:
    """Return the job whose data is read."""
    return {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": PACK_TOKENS, "sources": [{"name": "noise", "dataset": "noise"}]},
            "training": {"steps": steps, "packsPerStep": PACKS},
            "workers": {"replicas": 1, "devices": 1},
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
