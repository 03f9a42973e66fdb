"""LitData: chunks by ``StreamingDataset`` and ``StreamingDataLoader``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.loader.peer_work import BATCH, SHARD_BYTES, Given, collate, packed_loader
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader
from litdata.streaming.writer import BinaryWriter


def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
    """Write chunks."""
    place.mkdir()
    writer = BinaryWriter(str(place), chunk_bytes=SHARD_BYTES)
    for at, (jpeg, facts) in enumerate(samples):
        writer.add_item(at, {"jpg": jpeg, "json": facts})
    writer.done()
    writer.merge(num_workers=1)


def batches(given: Given) -> Iterable[Any]:
    """Read the only source, once."""
    copies = {"cache_dir": str(given.cache)} if given.is_remote else {}
    # Its faster client refuses a server without TLS, and has no setting for it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
    made = StreamingDataset(given.only, shuffle=True, transform=given.make, **copies)
    return StreamingDataLoader(made, batch_size=BATCH, num_workers=given.workers, collate_fn=collate)


def packs(given: Given) -> Iterable[Any]:
    """Read a mixture of local sources."""
    sources = [StreamingDataset(f"{given.root}/{name}", shuffle=True) for name in given.sources]
    mixed = CombinedStreamingDataset(sources, weights=given.shares, iterate_over_all=False)
    return packed_loader(mixed, given)
