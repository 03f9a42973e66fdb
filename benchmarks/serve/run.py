"""``polyreme serve`` beside ``transformers serve``: the same export, 64 clients that stream, one thread each.

Usage: run.py [--clients 64] [--requests 128] [--shortest 16] [--longest 128]

Each client asks one question after another. transformers runs with continuous batching and, once more, without it; the
better one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.serve.exported import export_text

HERE = Path(__file__).parent
INSTALLED = Path.home() / ".cache/polyreme/serve-peers"
CHAT = "/v1/chat/completions"
WORDS = ("which", "digits", "are", "on", "the", "page", "from", "left", "to", "right")
START_S, ANSWER_S = 300.0, 600.0
BAR = {"throughput_over_transformers_ratio": 3.0, "first_token_p99_ratio": 1.0, "failed": 0}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question, and the longest answer that is wanted."""

    text: str
    tokens: int


@dataclasses.dataclass(slots=True)
class Seen:
    """What clients saw of a server."""

    first_s: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    wall_s: float = 0.0
    failed: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of all clients together."""
        return self.tokens / self.wall_s if self.first_s else 0.0

    @property
    def first_token_p99_s(self) -> float:
        """Time to the first token."""
        return sorted(self.first_s)[int(0.99 * (len(self.first_s) - 1))] if self.first_s else float("inf")


def main() -> int:
    """Compare; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=16, help="answer [tokens]")
    parser.add_argument("--longest", type=int, default=128, help="answer [tokens]")
    parser.add_argument("--installed", type=Path, default=INSTALLED, help="folder of the peer; made if there is none")
    options = parser.parse_args()
    install(options.installed)
    asked = drawn(options)
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "model"
        export_text(export)
        seen = {name: measured(name, export, options, asked) for name in ("ours", "batching", "plain")}
    if not any(seen[name].first_s for name in ("batching", "plain")):
        raise SystemExit("the peer answered nothing")
    theirs = max((seen[name] for name in ("batching", "plain")), key=lambda of: of.tokens_per_s)
    ours = seen["ours"]
    figures: dict[str, Any] = {
        "throughput_over_transformers_ratio": round(ours.tokens_per_s / theirs.tokens_per_s, 2),
        "first_token_p99_ratio": round(ours.first_token_p99_s / theirs.first_token_p99_s, 3),
        "failed": ours.failed,
        "tokens_per_s": {name: round(of.tokens_per_s, 1) for name, of in seen.items()},
        "first_token_p99_s": {name: round(of.first_token_p99_s, 2) for name, of in seen.items() if of.first_s},
        "failed_of_theirs": {name: of.failed for name, of in seen.items() if name != "ours"},
    }
    ok = (
        figures["throughput_over_transformers_ratio"] >= BAR["throughput_over_transformers_ratio"]
        and figures["first_token_p99_ratio"] <= BAR["first_token_p99_ratio"]
        and not ours.failed
    )
    sys.stdout.write(json.dumps({"name": "bench-serve", "figures": figures, "bar": BAR, "ok": ok}) + "\n")
    return 0 if ok else 1


def install(folder: Path) -> None:
    """Put the peer into a folder of its own."""
    if not (folder / "fastapi").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "-r", str(HERE / "peers.txt")], check=True)


def drawn(options: argparse.Namespace) -> list[Asked]:
    """Draw questions and lengths of answers."""
    draw = random.Random(7)
    return [
        Asked(" ".join(draw.choices(WORDS, k=12)), draw.randint(options.shortest, options.longest))
        for _ in range(options.requests)
    ]


def measured(name: str, export: Path, options: argparse.Namespace, asked: Sequence[Asked]) -> Seen:
    """Start a server, ask it once to warm it, then by all clients."""
    with served(name, export, options) as url:
        return asyncio.run(ask_all(url, str(export), options.clients, asked))


@contextlib.contextmanager
def served(name: str, export: Path, options: argparse.Namespace) -> Iterator[str]:
    """Start a server; yield its address."""
    port = free_port()
    binaries = Path(sys.executable).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if name == "ours":
        rows = ["--rows", str(options.clients), "--queue", str(options.clients), "--name", str(export)]
        command = [str(binaries / "polyreme"), "serve", str(export), "--port", str(port), "--timeout", "600", *rows]
    else:
        environment["PYTHONPATH"] = str(options.installed)
        how = ["--continuous-batching"] if name == "batching" else []
        command = [str(binaries / "transformers"), "serve", str(export), "--port", str(port), "--device", "cpu"]
        command += ["--dtype", "float32", *how]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            asyncio.run(ready(f"http://127.0.0.1:{port}", process))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers anything."""
    until_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until_s and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/v1/models"):
                    return
            await asyncio.sleep(0.2)
    raise SystemExit(f"server did not start: {process.args!r}")


async def ask_all(url: str, model: str, clients: int, asked: Sequence[Asked]) -> Seen:
    """Ask all questions by so many clients at once."""
    waiting, seen = list(reversed(asked)), Seen()
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, url, model, Asked(" ".join(WORDS), 8), Seen())

        async def client() -> None:
            while waiting:
                await ask(session, url, model, waiting.pop(), seen)

        begun_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        seen.wall_s = time.monotonic() - begun_s
    return seen


async def ask(session: aiohttp.ClientSession, url: str, model: str, asked: Asked, seen: Seen) -> None:
    """Ask one question, and count the tokens of its answer: events with a text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": asked.text}],
        "max_tokens": asked.tokens,
        "stream": True,
        "temperature": 0,
    }
    begun_s, first_s, events = time.monotonic(), 0.0, 0
    try:
        async with session.post(url + CHAT, json=body) as response:
            async for line in response.content:
                if b'"error"' in line:
                    events = 0
                    break
                if response.status == 200 and b'"content"' in line:
                    first_s = first_s or time.monotonic() - begun_s
                    events += 1
    except (aiohttp.ClientError, TimeoutError):
        events = 0
    if events:
        seen.first_s.append(first_s)
        seen.tokens += asked.tokens
    else:
        seen.failed += 1


if __name__ == "__main__":
    sys.exit(main())
