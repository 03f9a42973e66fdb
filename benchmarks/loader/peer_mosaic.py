"""Mosaic Streaming: MDS shards by ``StreamingDataset``, over torch's loader."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.loader.peer_work import BATCH, SHARD_BYTES, Given, collate, packed_loader
from streaming import MDSWriter, Stream, StreamingDataset
from torch.utils.data import DataLoader

EPOCH_SAMPLES = 4_096
"""Samples of an epoch of a mixture: a worker reads no second one."""


def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
    """Write shards."""
    with MDSWriter(out=str(place), columns={"jpg": "bytes", "json": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for jpeg, facts in samples:
            writer.write({"jpg": jpeg, "json": facts})


def batches(given: Given) -> Iterable[Any]:
    """Read the only source, once."""

    class Made(StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, at: int | slice | list[int] | np.ndarray[Any, Any]) -> Any:
            return given.make(super().__getitem__(at))

    place = {"remote": given.only, "local": str(given.cache)} if given.is_remote else {"local": given.only}
    made = Made(**place, shuffle=True, batch_size=BATCH)
    return DataLoader(made, batch_size=BATCH, num_workers=given.workers, collate_fn=collate)


def packs(given: Given) -> Iterable[Any]:
    """Read a mixture of local sources."""
    streams = [
        Stream(local=f"{given.root}/{name}", proportion=share)
        for name, share in zip(given.sources, given.shares, strict=True)
    ]
    mixed = StreamingDataset(streams=streams, epoch_size=EPOCH_SAMPLES, shuffle=True, batch_size=1)
    return packed_loader(mixed, given)
