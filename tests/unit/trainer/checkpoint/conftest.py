"""A process group of one rank, checkpoint roots in a folder and in a bucket, and small contents to save there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyreme_api.store import ObjectStore
from polyreme_datahub.objects import open_store
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.checkpoint.content import Content, FlatTensors
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import AfterStep, CheckpointWriter, Identity
from polyreme_trainer.checkpoint.shards import ShardAxis, TensorShard
from polyreme_trainer.model.sharding import Cut
from polyreme_trainer.parallel.flat_layout import Slot


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Other files of the same process have ranks that open the world themselves, so it ends with the file."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("bucket") if request.param == "bucket" else (tmp_path / "root").as_uri()


@pytest.fixture
def root(url: str) -> ObjectStore:
    return open_store(url, sleep=lambda _: None)


def make_content(seed: int, *, rows: int = 6, columns: int = 50, place: int = 0, parts: int = 1) -> Content:
    """Five tensors in each of two buffers, sliced, and two small ones."""
    draw = torch.Generator().manual_seed(seed)
    own = rows // parts
    whole = torch.rand(2, 5, rows, columns, generator=draw)
    slots = [Slot(name=f"layer.{n}.w", start=n * own * columns, shape=(own, columns)) for n in range(5)]
    axes = (ShardAxis("tensor", Cut(dim=0), place, parts),) if parts > 1 else ()
    flat = [
        FlatTensors(
            prefix=prefix,
            slots=slots,
            buffer=whole[number, :, place * own : (place + 1) * own].reshape(-1).clone(),
            shards=[TensorShard(name=slot.name, axes=axes) for slot in slots],
        )
        for number, prefix in enumerate(("model", "optimizer.first"))
    ]
    plain = {"router_bias.0": torch.rand(8, generator=draw), "rng.0": torch.tensor([seed, 1, 2], dtype=torch.uint8)}
    return Content(flat=flat, plain=plain)


def equal(one: Content, other: Content) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def writer_of(
    store: ObjectStore, group: dist.ProcessGroup, *, attempt: int = 1, kept: int = 1, copies: HostCopies | None = None
) -> CheckpointWriter:
    identity = Identity(store=store, attempt=attempt, shape=KIMI_VL_NANO, plan_hash="p", rule=Rule(kept=kept))
    return CheckpointWriter(identity, group=group, now_s=lambda: 1.0, committed=lambda _: None, copies=copies)


def save(store: ObjectStore, group: dist.ProcessGroup, content: Content, *, step: int = 5, attempt: int = 1) -> str:
    """Save and commit; return the name."""
    with writer_of(store, group, attempt=attempt) as writer:
        writer.start(content, step=step, after=AfterStep(loader={"step": step}))
        writer.wait()
    return f"a{attempt:06d}-s{step:08d}"
