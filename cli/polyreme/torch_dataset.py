"""A processed job's training data as a torch ``IterableDataset``, for training loops that are not ours.

    from polyreme.torch_dataset import PackedDataset
    loader = torch.utils.data.DataLoader(PackedDataset("s3://lakehouse", spec, rank=3, ranks=8), batch_size=None)

A batch is the share of one rank in one step. The order is a function of the job's spec: the same with any number of
workers, and after a restart (``state_dict``), also with another number of ranks.

Shape suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.loader.job_packs import open_source
from polyreme_datahub.loader.open import open_steps
from polyreme_datahub.loader.source import PackedSource

TENSORS = ("tokens_T", "targets_T", "positions_T", "document_offsets", "branches_B4", "patches_PC", "grids_I2")
STATE_VERSION = 1


class PackedDataset(IterableDataset[dict[str, Any]]):
    """Batches of one rank, a step each: use ``batch_size=None``.

    A batch has tensors under the names of ``polyreme_api.batch.PackedBatch`` (``tokens_T``, ``targets_T`` with -100
    where nothing is learned, ``positions_T``, ``document_offsets``, ``branches_B4`` with the two answers of each pair,
    ``patches_PC``, ``grids_I2``), and ``sample_ids``
    and ``step``. With N workers, each reads every Nth step, so the loader yields the steps in order.

    ``state_dict`` is that of torchdata's ``StatefulDataLoader``, or, without a loader, of a loop over this dataset.

    Args:
        objects_url: Object store of the processed data: ``s3://bucket/prefix`` or ``file:///folder``.
        spec: The job's spec.
        job: UID of the job whose data it is; empty: of ``polyreme_datahub.hub.process`` without a job.
        rank: Number of this data-parallel rank.
        ranks: Data-parallel ranks; a step's packs are shared among them, as evenly as they can be.
        steps: Last step; None: the job's.

    Raises:
        InvalidConfigError: If there is no such rank.
    """

    def __init__(
        self,
        objects_url: str,
        spec: TrainingJobSpec,
        *,
        job: str = "",
        rank: int = 0,
        ranks: int = 1,
        steps: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= rank < ranks:
            raise InvalidConfigError(f"no such rank: {rank} of {ranks}, expected 0 to {ranks - 1}", field="rank")
        self._objects_url, self._spec, self._job = objects_url, spec, job
        self._rank, self._ranks = rank, ranks
        self._steps = open_steps(objects_url, spec, job=job).training.steps_known if steps is None else steps
        self._next_step, self._worker = 1, (0, 0)
        """The next step; number of the worker that reads it and count of workers, (0, 0) without workers."""
        self._state: Mapping[str, Any] | None = None
        """Of the data, at the step before the next one."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches from the next step on.

        Raises:
            RefusedError: If the state is of other data, or of another number of workers.
            EnvironmentFailedError: If the data is not processed.
        """
        info = get_worker_info()
        worker = (0, 0) if info is None else (info.id, info.num_workers)
        if self._worker not in {(0, 0), worker}:
            raise RefusedError(
                f"state of worker {self._worker[0]} of {self._worker[1]}, this is worker {worker[0]} of {worker[1]}; "
                "use as many workers as when it was saved"
            )
        # A state saved without workers is where all of them begin; a worker's own state is where it continues.
        step = self._next_step + (worker[0] if self._worker != worker else 0)
        source = self._open()
        if self._state is not None:
            source.check_state(self._state)
        self._worker = worker
        while step <= self._steps:
            batch = self._batch(source, step)
            self._state = source.state(step)
            step += max(1, worker[1])
            self._next_step = step
            yield batch

    def pairs_digests(self) -> list[str | None]:
        """Return the digest of each source's pairs, in the job's order; None: its samples are no pairs.

        Raises:
            EnvironmentFailedError: If the data is not processed.
        """
        return [None if pairs is None else pairs.digest for pairs in self._open().preference_sets]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as JSON: a few hundred bytes."""
        return {
            "version": STATE_VERSION,
            "nextStep": self._next_step,
            "worker": list(self._worker),
            "data": None if self._state is None else dict(self._state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            RefusedError: If it is no state of this class.
        """
        if state.get("version") != STATE_VERSION:
            raise RefusedError(f"not a state of a PackedDataset: version {state.get('version')!r}, expected 1")
        self._next_step, self._state = int(state["nextStep"]), state["data"]
        number, count = state["worker"]
        self._worker = (int(number), int(count))

    def _open(self) -> PackedSource:
        """Open the data in the process that reads it: its threads and mappings are not for a fork."""
        return open_source(self._objects_url, self._spec, job=self._job, wait_s=0.0)

    def _batch(self, source: PackedSource, step: int) -> dict[str, Any]:
        packs = source.packs_in(step)
        first, stop = (packs * rank // self._ranks for rank in (self._rank, self._rank + 1))
        if first == stop:
            raise InvalidConfigError(
                f"step {step} has {packs} packs for {self._ranks} ranks, expected at least one each",
                field="spec.training.packsPerStep",
            )
        found = dataclasses.asdict(source.packs(step, first=first, count=stop - first))
        tensors = {name: torch.from_numpy(np.ascontiguousarray(found[name])) for name in TENSORS}
        return {**tensors, "sample_ids": list(found["sample_ids"]), "step": step}
