"""Values that every later version must read from a kept home: losses, checkpoint tensors, packs, datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from polyreme.job_files import read_job
from polyreme.run_files.paths import Home
from polyreme.run_files.records import read_records
from polyreme_api.checkpoint_inventory import State, survey
from polyreme_datahub import hub
from polyreme_datahub.loader import job_packs
from polyreme_datahub.objects import open_store
from polyreme_system.files import read_json
from polyreme_trainer.checkpoint.block_io import read_pieces
from polyreme_trainer.checkpoint.index import INDEX_NAME, read_index
from polyreme_trainer.checkpoint.load import read_marker

VALUES = "values.json"
PACKS_OF_STEPS = (1, 2, 5)


def write_values(folder: Path, values: dict[str, Any]) -> None:
    """Write the values beside the home."""
    (folder / VALUES).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def kept_values(home: Path, runs: Sequence[str]) -> dict[str, Any]:
    """Read a home."""
    return {"datasets": dataset_values(home), "runs": {name: run_values(home, name) for name in runs}}


def run_values(home: Path, name: str) -> dict[str, Any]:
    """Read what a run left: its history, its newest checkpoint, its first packs."""
    run = Home(path=home).run("default", name)
    records = read_records(run.checkpoints)
    return {
        "attempts": [point.model_dump(mode="json", by_alias=True, exclude_unset=True) for point in records.points],
        "history": {str(record.step): record.loss.hex() for record in records.history},
        "discarded": len(records.discarded),
        "tensors": checkpoint_tensors(run.checkpoints),
        "packs": pack_digests(home, name),
    }


def checkpoint_tensors(root: Path) -> dict[str, Any]:
    """Count and digest the tensors of each committed checkpoint: weights, optimizer state, generators."""
    store = open_store(root.as_uri())
    digests = {}
    for stored in survey(store).of(State.WHOLE):
        marker = read_marker(store, stored.name)
        pieces = read_index(store.get(f"{stored.name}/{INDEX_NAME}"), name=stored.name)
        state = {piece.tensor: torch.zeros(piece.shape, dtype=piece.dtype) for piece in pieces}
        read_pieces(store, stored.name, marker, state)
        digests[stored.name] = tensor_values(state)
    return digests


def export_tensors(folder: Path) -> dict[str, Any]:
    """Count and digest the tensors of an exported model."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensor_values(tensors)


def tensor_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Count tensors and digest their names, types, shapes and bytes."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_digest(content)}\n")
    return {"count": len(lines), "digest": _digest("".join(lines).encode())}


def pack_digests(home: Path, name: str) -> dict[str, str]:
    """Digest the packs of some steps of a run as its ranks read them, images included."""
    place = Home(path=home)
    run = place.run("default", name)
    job = read_job(run.job_file)
    uid = str((read_json(run.data_report) or {})["job"])
    source = job_packs.open_source(place.objects_url, job.spec, job=uid, wait_s=0.0)
    return {str(step): _packs(source, step) for step in PACKS_OF_STEPS}


_NORMAL = ((np.arange(256, dtype=np.float32) / np.float32(255)) - np.float32(0.5)) / np.float32(0.5)
"""Values of bytes of pixels as the loader of then normalised them."""


def _packs(source: Any, step: int) -> str:
    batch = source.packs(step, first=0, count=source.packs_in(step))
    grids = source.grids(step, first=0, count=source.packs_in(step))
    assert [tuple(pair) for grid in grids for pair in grid] == [tuple(pair) for pair in batch.grids_I2]
    arrays = (
        batch.tokens_T,
        batch.targets_T,
        batch.positions_T,
        batch.document_offsets,
        _NORMAL[np.asarray(batch.patches_PC)],
    )
    return _digest(b"".join(np.ascontiguousarray(array).tobytes() for array in (*arrays, batch.grids_I2)))


def dataset_values(home: Path) -> dict[str, Any]:
    """List the datasets of a home, and count what was made of each and what was rejected."""
    place = Home(path=home)
    found = {}
    for summary in hub.list_datasets(place.registry_url):
        if not summary.name.startswith("sample/"):
            details = hub.show_dataset(place.registry_url, place.objects_url, summary.name)
            found[summary.name] = {
                "kind": summary.kind,
                "records": summary.records,
                "samples": details.samples,
                "indexes": [[index.manifest, index.samples, index.tokens] for index in details.indexes],
                "operations": {count.stage: [count.hits, count.misses, count.dead] for count in details.stages},
                "deadLetters": [[letter.sample_id, letter.rule, letter.error] for letter in details.dead_letters],
            }
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
