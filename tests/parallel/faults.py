"""Faults of a rank in a test: signals, full disks, and object stores that fail, stop or kill it at a write."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from polyreme_api.store import Data, ObjectInfo, ObjectStore, StoreFailedError
from polyreme_datahub.objects import open_store
from polyreme_trainer.parallel import pipeline
from polyreme_trainer.train import microbatches, parameter_hash
from tests.unit.datahub.stores import PassingStore


def signal_of(name: str) -> Callable[[], None]:
    """What a rank does to itself before a step."""
    return {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "save": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    }[name]


def fill_disk() -> None:
    """Files of this process may not grow beyond 64 KiB: a write then fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))


def kill_at(at_bytes: int) -> None:
    """Let the kernel end this process at the first file that grows beyond so many bytes, in the middle of the write."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, resource.RLIM_INFINITY))


def flip_bit(*, step: int, part: str) -> None:
    """Change one bit of this rank's parameters of a part after a step, as memory that fails does."""
    real = vars(parameter_hash)["check_copies"]

    def check(flat: Any, *arguments: Any, **options: Any) -> None:
        if options["step"] == step:
            buffers = flat.sharded if part == "sharded" else [getattr(flat, part)]
            memory = [each for buffer in buffers for each in getattr(buffer, "flat", buffer).memory()]
            max(memory, key=torch.numel).view(torch.int32).view(-1)[7] ^= 1
        real(flat, *arguments, **options)

    vars(parameter_hash)["check_copies"] = check


def compute_wrongly(*, step: int, times: int) -> None:
    """Let a rank add to a gradient of its own in a step, so many times, as a device that fails does."""
    real, read, left = pipeline.OneStage.run, microbatches.PackReader.take, [times]
    taken: list[int] = []

    def take(reader: microbatches.PackReader, number: int) -> list[microbatches.ReadPacks]:
        taken.append(number)
        return read(reader, number)

    def run(stage: pipeline.OneStage, batches: Any) -> torch.Tensor:
        loss = real(stage, batches)
        if taken[-1] == step and left[0]:
            left[0] -= 1
            for parameter in list(stage._stage.model.parameters())[:3]:
                cast("torch.Tensor", parameter.grad).view(-1)[:64].add_(1e6)
        return loss

    for owner, name, method in ((microbatches.PackReader, "take", take), (pipeline.OneStage, "run", run)):
        setattr(owner, name, method)


def at_write(rank: int, what: str, key: str, **how: Any) -> dict[str, Any]:
    """What a test asks for where a rank's store fails, stops or kills it at a write to a key (`FaultyStore`)."""
    return {"store_fault": {"rank": rank, "how": {"what": what, "at": key, **how}}}


def store_of(request: Mapping[str, Any], rank: int) -> ObjectStore:
    """The checkpoint root, with the fault that the test wants of this rank's calls."""
    store = open_store(request.get("url", Path(request["root"]).as_uri()))
    fault = request.get("store_fault")
    return FaultyStore(store, **fault["how"]) if fault and fault["rank"] == rank else store


class FaultyStore(PassingStore):
    """Fails, stops or kills this process at a write to a key, once, or counts on failing."""

    def __init__(self, store: ObjectStore, *, what: str, at: str, after: bool = False, times: int = 1) -> None:
        super().__init__(store)
        self._what, self._at, self._after, self._left = what, at, after, times

    def put(self, key: str, data: Data) -> None:
        with self._fault(key):
            super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._fault(key):
            super().put_if_absent(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._fault(f"list {prefix}"):
            return iter(list(super().list(prefix)))

    @contextlib.contextmanager
    def _fault(self, key: str) -> Iterator[None]:
        strikes = key.endswith(self._at) and self._left > 0
        self._left -= strikes
        if strikes and not self._after:
            self._strike()
        yield
        if strikes and self._after:
            self._strike()

    def _strike(self) -> None:
        if self._what == "fail":
            raise StoreFailedError("object store failed: input/output error")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self._what])
        time.sleep(0.2)  # the signal may reach another thread first: this one must not run on meanwhile
