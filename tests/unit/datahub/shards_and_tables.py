"""Makes tar shards and tables for tests."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.unit.datahub.jobs import picture


def tar_of(members: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a tar of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_shards(folder: Path, *, shards: int = 2, samples: int = 3) -> Path:
    """Write shards of images with captions, each picture another one."""
    folder.mkdir()
    for shard in range(shards):
        members = []
        for at in range(shard * samples, (shard + 1) * samples):
            members += [(f"{at:04}.png", picture(8, 8, seed=at)), (f"{at:04}.txt", f"Picture {at}.".encode())]
        (folder / f"train-{shard:05}-of-{shards:05}.tar").write_bytes(tar_of(members))
    return folder


def rows_of(first: int, count: int) -> dict[str, Sequence[Any]]:
    """Return rows of images, as Hugging Face's feature writes them, with conversations."""
    return {
        "image": [{"bytes": picture(8, 8, seed=at), "path": f"{at}.png"} for at in range(first, first + count)],
        "conversations": [
            [{"from": "human", "value": f"<image>\nWhat is {at}?"}, {"from": "gpt", "value": f"Picture {at}."}]
            for at in range(first, first + count)
        ],
        "license": ["CC0"] * count,
    }


def write_parquet(path: Path, rows: Mapping[str, Sequence[Any]], *, group_rows: int = 2) -> Path:
    """Write a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(dict(rows)), path, row_group_size=group_rows)
    return path


def write_arrow(path: Path, rows: Mapping[str, Sequence[Any]], *, batch_rows: int = 2) -> Path:
    """Write an Arrow stream, as ``save_to_disk`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(dict(rows))
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def write_saved(folder: Path, *, files: int = 2, rows: int = 3) -> Path:
    """Write a folder as ``save_to_disk`` does, with a file of its cache that is no data."""
    names = [f"data-{at:05}-of-{files:05}.arrow" for at in range(files)]
    for at, name in enumerate(names):
        write_arrow(folder / name, rows_of(rows * at, rows))
    write_arrow(folder / "cache-0123.arrow", rows_of(0, 1))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder
