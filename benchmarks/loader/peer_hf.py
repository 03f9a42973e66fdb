"""Hugging Face datasets over torch's loader: an Arrow table on a disk (map style), Parquet in a bucket (streamed)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
from benchmarks.loader.peer_work import BATCH, SHARD_BYTES, SHUFFLED, Given, packed_loader, shards_of
from torch.utils.data import DataLoader

ROW_GROUP = 100
"""Rows of a Parquet row group; the library's own choice for images."""


def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
    """Write Parquet files, and the Arrow table that the library makes of them at their first use."""
    place.mkdir()
    tables = [_table(shard) for shard in shards_of(samples)]
    for number, table in enumerate(tables):
        table.to_parquet(place / f"{number:06d}.parquet", batch_size=ROW_GROUP)
    datasets.concatenate_datasets(tables).save_to_disk(place / "arrow", max_shard_size=SHARD_BYTES)


def _table(samples: Sequence[tuple[bytes, bytes]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"jpg": [jpeg for jpeg, _ in samples], "json": [facts for _, facts in samples]})


def batches(given: Given) -> Iterable[Any]:
    """Read the only source, once."""
    if not given.is_remote:
        table = datasets.load_from_disk(f"{given.only}/arrow")
        return DataLoader(table, batch_size=BATCH, shuffle=True, num_workers=given.workers, collate_fn=given.make_batch)
    files = [f"{given.only}/{name}" for name in given.shards]
    stream = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(given.cache)
    )
    shuffled = stream.shuffle(buffer_size=SHUFFLED, seed=1)
    return DataLoader(shuffled, batch_size=BATCH, num_workers=given.workers, collate_fn=given.make_batch)


def packs(given: Given) -> Iterable[Any]:
    """Read a mixture of local sources."""
    tables = [datasets.load_from_disk(f"{given.root}/{name}/arrow") for name in given.sources]
    streams = [
        table.to_iterable_dataset(num_shards=max(1, given.workers)).shuffle(buffer_size=SHUFFLED, seed=1)
        for table in tables
    ]
    mixed = datasets.interleave_datasets(streams, probabilities=given.shares, seed=1, stopping_strategy="all_exhausted")
    return packed_loader(mixed, given)
