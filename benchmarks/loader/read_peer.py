"""Writes the shards of one peer, or reads them and prints what it took.

Usage: read_peer.py JSON, see ``Asked``. Each peer has its own shards, shuffles, makes samples in its worker processes
by the functions of work.py, and passes batches to this process as tensors in shared memory.
"""

import dataclasses
import importlib
import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from benchmarks.loader import peer_work, work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the benchmark asks of this process."""

    peer: str
    """Name of a module ``peer_<name>``, or ``plain``: a loop in this process."""
    folder: str
    """Of the data: photographs, facts and tokenizer."""
    write: bool = False
    root: str = ""
    """Of the peer's shards; see ``peer_work.Given``."""
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cache: str = ""
    workers: int = 0
    resizer: str = work.PILLOW
    packs: int = 0
    """How many packs are read; 0: samples are not packed, and each is read once."""
    pack_tokens: int = 0


def main(asked: Asked) -> None:
    """Write or read."""
    folder = Path(asked.folder)
    if asked.write:
        for name in asked.sources:
            Path(asked.root).mkdir(parents=True, exist_ok=True)
            peer(asked).write(Path(asked.root, name), samples_of(folder / "samples" / name))
        return
    given = _given(asked)
    meter = work.Meter()
    if asked.packs:
        for batch in itertools.islice(peer(asked).packs(given), asked.packs):
            meter.take_packs(1, sum(batch["token_counts"]), sum(batch["patch_counts"]), len(batch["names"]))
        meter.report(pack_tokens=asked.pack_tokens)
    else:
        for batch in plain(given, folder) if asked.peer == "plain" else peer(asked).batches(given):
            take(meter, batch)
        meter.report()


def peer(asked: Asked) -> ModuleType:
    """The module that reads and writes as a peer does; only its own environment has the peer's library."""
    return importlib.import_module(f"benchmarks.loader.peer_{asked.peer}")


def take(meter: work.Meter, batch: Mapping[str, Any]) -> None:
    """Take the samples of a batch."""
    starts, tokens_T = np.cumsum([0, *batch["patch_counts"]]), batch["tokens"].numpy()
    token_starts, patches_PC = np.cumsum([0, *batch["token_counts"]]), batch["patches"].numpy()
    for at, name in enumerate(batch["names"]):
        tokens = tokens_T[token_starts[at] : token_starts[at + 1]]
        meter.take(name, tokens, patches_PC[starts[at] : starts[at + 1]])
    meter.end_batch()


def plain(given: peer_work.Given, folder: Path) -> Iterable[Any]:
    """Make samples in a loop: the cost of the functions themselves."""
    [name] = given.sources
    samples = ({"jpg": jpeg, "json": facts} for jpeg, facts in samples_of(folder / "samples" / name))
    while some := list(itertools.islice(samples, peer_work.BATCH)):
        yield given.make_batch(some)


def samples_of(folder: Path) -> Iterable[tuple[bytes, bytes]]:
    """Give photographs with their facts; a sample without an image has no bytes there."""
    for path in sorted(folder.glob("*.json")):
        yield path.with_suffix(".jpg").read_bytes(), path.read_bytes()


def _given(asked: Asked) -> peer_work.Given:
    settings = json.loads(Path(asked.folder, "work.json").read_text())
    made = work.Work(
        Path(asked.folder, "tokenizer.json"), settings["patch_px"], settings["merge"], resizer=asked.resizer
    )
    local = Path(asked.folder, "shards", asked.peer, next(iter(asked.sources)))
    return peer_work.Given(
        root=asked.root,
        sources=asked.sources,
        cache=Path(asked.cache),
        workers=asked.workers,
        shards=sorted(path.name for path in local.iterdir() if path.is_file()) if asked.peer != "plain" else (),
        made=made,
        pack_tokens=asked.pack_tokens,
    )


if __name__ == "__main__":
    main(Asked(**json.loads(sys.argv[1])))
