"""Mosaic Streaming, LitData and WebDataset on the same photographs: written once, then read by worker processes.

Usage: peers.py write|read plain|mosaic|litdata|webdataset FOLDER WORKERS

Each has its own shards on the local disk, shuffles, makes samples in its workers by the functions of work.py, and
passes batches to the parent as tensors in shared memory.
"""

import functools
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from torch.utils.data import DataLoader

BATCH = 8
"""As many samples as a step of ours has."""
SHARD_BYTES = 8 * 2**20
BUFFER = 64
"""Samples among which WebDataset shuffles."""


def main(verb: str, peer: str, folder: Path, workers: int) -> None:
    """Write a peer's shards, or read them."""
    if verb == "write":
        READERS[peer].write(folder / peer, samples_of(folder))
        return
    settings = json.loads((folder / "work.json").read_text())
    made = work.Work(folder / "tokenizer.json", settings["patch_px"], settings["merge"])
    opened = READERS[peer]
    opened.imports()
    meter = work.Meter()
    loader = opened.read(folder / peer, functools.partial(make, made), workers)
    for batch in loader:
        starts, tokens_T = np.cumsum([0, *batch["patch_counts"]]), batch["tokens"].numpy()
        token_starts, patches_PC = np.cumsum([0, *batch["token_counts"]]), batch["patches"].numpy()
        for at, name in enumerate(batch["names"]):
            tokens = tokens_T[token_starts[at] : token_starts[at + 1]]
            meter.take(name, tokens, patches_PC[starts[at] : starts[at + 1]])
        meter.end_batch()
    meter.report()


def samples_of(folder: Path) -> Iterable[tuple[bytes, bytes]]:
    """Give photographs with their facts."""
    for path in sorted((folder / "samples").glob("*.json")):
        yield path.with_suffix(".jpg").read_bytes(), path.read_bytes()


def make(made: work.Work, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Make a sample in a worker."""
    return made.make(bytes(sample["jpg"]), json.loads(bytes(sample["json"])))


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay samples one after another: tokens, targets' marks and patches, each as one tensor."""
    return {
        "names": [sample["name"] for sample in samples],
        "token_counts": [len(sample["tokens"]) for sample in samples],
        "patch_counts": [len(sample["patches"]) for sample in samples],
        "tokens": torch.from_numpy(np.concatenate([sample["tokens"] for sample in samples]).astype(np.int64)),
        "learned": torch.from_numpy(np.concatenate([sample["learned"] for sample in samples])),
        "patches": torch.from_numpy(np.concatenate([sample["patches"] for sample in samples])),
    }


class Mosaic:
    """MDS shards by ``StreamingDataset``, over torch's loader."""

    @staticmethod
    def imports() -> None:
        """Import what is not measured."""
        import streaming  # noqa: F401

    @staticmethod
    def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
        """Write shards."""
        from streaming import MDSWriter

        with MDSWriter(out=str(place), columns={"jpg": "bytes", "json": "bytes"}, size_limit=SHARD_BYTES) as writer:
            for jpeg, facts in samples:
                writer.write({"jpg": jpeg, "json": facts})

    @staticmethod
    def read(place: Path, make: Any, workers: int) -> Iterable[Any]:
        """Read shards."""
        from streaming import StreamingDataset

        class Made(StreamingDataset):  # type: ignore[misc, unused-ignore]
            def __getitem__(self, at: int) -> Any:
                return make(super().__getitem__(at))

        made = Made(local=str(place), shuffle=True, batch_size=BATCH)
        return DataLoader(made, batch_size=BATCH, num_workers=workers, collate_fn=collate)


class LitData:
    """Chunks by ``StreamingDataset`` and ``StreamingDataLoader``."""

    @staticmethod
    def imports() -> None:
        """Import what is not measured."""
        import litdata  # noqa: F401

    @staticmethod
    def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
        """Write chunks."""
        from litdata.streaming.writer import BinaryWriter

        place.mkdir()
        writer = BinaryWriter(str(place), chunk_bytes=SHARD_BYTES)
        for at, (jpeg, facts) in enumerate(samples):
            writer.add_item(at, {"jpg": jpeg, "json": facts})
        writer.done()
        writer.merge(num_workers=1)

    @staticmethod
    def read(place: Path, make: Any, workers: int) -> Iterable[Any]:
        """Read chunks."""
        from litdata import StreamingDataLoader, StreamingDataset

        made = StreamingDataset(str(place), shuffle=True, transform=make)
        return StreamingDataLoader(made, batch_size=BATCH, num_workers=workers, collate_fn=collate)


class WebDataset:
    """Tar files by ``WebDataset``, over torch's loader."""

    @staticmethod
    def imports() -> None:
        """Import what is not measured."""
        import webdataset  # noqa: F401

    @staticmethod
    def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
        """Write tar files of equal counts."""
        place.mkdir()
        listed = list(samples)
        per_shard = max(1, SHARD_BYTES * len(listed) // sum(len(jpeg) for jpeg, _ in listed))
        for first in range(0, len(listed), per_shard):
            with tarfile.open(place / f"{first:06d}.tar", "w") as shard:
                for at, pair in enumerate(listed[first : first + per_shard], first):
                    for data, kind in zip(pair, ("jpg", "json"), strict=True):
                        member = tarfile.TarInfo(f"{at:06d}.{kind}")
                        member.size = len(data)
                        shard.addfile(member, io.BytesIO(data))

    @staticmethod
    def read(place: Path, make: Any, workers: int) -> Iterable[Any]:
        """Read tar files."""
        import webdataset

        shards = sorted(str(path) for path in place.glob("*.tar"))
        made = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=1)
        made = made.shuffle(BUFFER).map(make).batched(BATCH, collation_fn=collate)
        return webdataset.WebLoader(made, batch_size=None, num_workers=workers)


class Plain:
    """A loop over files in this process: the cost of the functions themselves."""

    @staticmethod
    def imports() -> None:
        """Import nothing."""

    @staticmethod
    def read(place: Path, make: Any, workers: int) -> Iterable[Any]:
        """Read files."""
        del workers
        samples: list[Mapping[str, Any]] = []
        for jpeg, facts in samples_of(place.parent):
            samples.append(make({"jpg": jpeg, "json": facts}))
            if len(samples) == BATCH:
                yield collate(samples)
                samples = []
        if samples:
            yield collate(samples)


READERS: dict[str, Any] = {"plain": Plain, "mosaic": Mosaic, "litdata": LitData, "webdataset": WebDataset}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
