"""The packs of each step of a run, while blocks of its data are sealed and changes of its mixture are fixed.

The order itself is a pure function of a plan (``order``). Here the plan grows with the blocks of a job whose data are
still processed, is amended by changes that take effect at later steps, and the packs of a step are numbered as the
trainer reads them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import NotSealedError, RefusedError
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.index.format import PREFERENCES
from polyreme_datahub.loader.order.balance import StepSplit, assign_packs
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import Identity, OrderPlan
from polyreme_datahub.loader.order.slots import Slot
from polyreme_datahub.loader.sample.growth import Growth
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_planner.flops import uneven_flops
from polyreme_planner.shapes import ModelShape

ASSIGNED_STEPS_MAX = 16
"""Steps whose assignment of packs is kept; others are computed again."""

Packs: TypeAlias = Sequence[Sequence[Slot] | None]
"""Samples of each pack; None: a null pack."""


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """Balance of the packs of each step by their cost."""

    shape: ModelShape
    """Of the model, which says what a pack costs."""
    split: StepSplit


@dataclasses.dataclass(slots=True)
class Amendments:
    """Follows the mixture of an attempt: changes of it are fixed while the attempt runs."""

    known: MixtureRecord | None
    """The mixture by which the order was made."""
    read: Callable[[], MixtureRecord | None]
    """Returns the newest one that is fixed."""
    remake: Callable[[OrderPlan, MixtureRecord], tuple[OrderPlan, Identity]]
    """Makes the order of a mixture, and its identity."""

    def take(self, newest: MixtureRecord | None) -> int | None:
        """Take over a mixture; return the first step that may differ, None where nothing was appended.

        Mixtures only grow, so one that is read late, after a newer one, changes nothing.
        """
        if newest is None or self.known is None or newest.read <= self.known.read:
            return None
        appended = newest.changes[len(self.known.changes) :]
        self.known = newest
        return min((change.step for change in appended), default=None)


@dataclasses.dataclass(eq=False)
class Steps:
    """The packs of each step; threads may share it."""

    plan: OrderPlan
    """Order of the samples."""
    indexes: Sequence[MappedIndex]
    """One per source."""
    identity: Identity
    """What the data and its order are; a checkpoint's loader state must have what holds at its step."""
    balance: Balance | None = None
    """Assigns the packs of a step to ranks by cost; None: they are numbered as in the order."""
    growth: Growth | None = None
    """Blocks of the sources, where training may start before all are sealed."""
    amendments: Amendments | None = None
    """Changes of the mixture that are fixed later; None: there are none."""
    tokenizer: str = ""
    """Digest of the tokenizer, for runs that start from a checkpoint with other data."""

    def __post_init__(self) -> None:
        """Begin where nothing is known of the order."""
        self._order = Order(self.plan)
        self._assigned: OrderedDict[int, list[int]] = OrderedDict()
        """Number in the order of each pack, by step."""
        self._lock, self._growth_lock = threading.Lock(), threading.Lock()
        """The second is held while the journal is read, and is taken first."""

    def packs_in(self, step: int) -> int:
        """Packs that all ranks together train on in a step."""
        return self.plan.packs_in(self.plan.segment_of(step))

    def pack_tokens_in(self, step: int) -> int:
        """Tokens of one pack of a step."""
        return self.plan.tokens_in(self.plan.segment_of(step))

    def packs(self, step: int) -> Packs:
        """Return the packs of a step, in the trainer's numbering.

        Raises:
            NotSealedError: If the step needs a block that is not sealed; the caller asks again.
        """
        while True:
            with self._lock:
                known = self.plan
                try:
                    return self._numbered(step, self._order.packs(step))
                except NotSealedError as error:
                    unsealed = error
            if not self._grow(known):
                raise unsealed

    def samples(self, step: int) -> list[npt.NDArray[np.int64]]:
        """Return the samples of a step by source, as far as blocks are known.

        Raises:
            NotSealedError: If the step needs another block.
        """
        with self._lock:
            slots = [slot for slots in self._order.packs(step) for slot in slots]
        sources = range(len(self.indexes))
        return [np.array([slot.sample for slot in slots if slot.source == at], np.int64) for at in sources]

    def grids(self, packs: Packs) -> Sequence[npt.NDArray[np.int32]]:
        """Return the grids [I, 2] of the images of each pack, as the indexes have them.

        Ranks look the packs of their neighbours up at every step, so all at once: it costs a microsecond an image.
        """
        slots = [slot for slots in packs for slot in slots or ()]
        source_N, sample_N = (np.array(of, np.int64) for of in ([s.source for s in slots], [s.sample for s in slots]))
        looked_up = {source: self.indexes[source].grids_of(sample_N[source_N == source]) for source in set(source_N)}
        count_N = np.zeros(len(slots), np.int64)
        for source, (counts, _) in looked_up.items():
            count_N[source_N == source] = counts
        source_I = np.repeat(source_N, count_N)
        grids_I2 = np.zeros((len(source_I), 2), np.int32)
        for source, (_, found_I2) in looked_up.items():
            grids_I2[source_I == source] = found_I2
        ends = np.cumsum([0, *count_N])[np.cumsum([len(slots or ()) for slots in packs])]
        return np.split(grids_I2, ends[:-1])

    def state(self, step: int) -> Mapping[str, Any]:
        """Describe where a loader is after ``step``."""
        with self._lock:
            place = self._order.place(step + 1)
            state: dict[str, Any] = {"data": self.identity.at(step), "step": step, "window": place}
            if self.identity.mixture is not None:
                state["mixture"] = self.identity.mixture.summary()
            if self.tokenizer:
                state["tokenizer"] = self.tokenizer
            if self.growth is not None:
                state["blocks"] = self.growth.describe(self._order.blocks_before(step + 1))
            return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to continue from a state that another dataset or order made; a good one needs no walk.

        Raises:
            NotSealedError: If blocks that the state has seen are not there (yet).
            RefusedError: If the data's identity differs.
        """
        step = state.get("step")
        identity = self.identity.at(step if type(step) is int and step > 0 else 0)
        if state.get("data") != identity:
            raise RefusedError(
                f"loader state belongs to other data: {state.get('data')!r} of step {step}, this job has {identity!r}",
                field="spec.data",
            )
        self._grow(self.plan)
        with self._lock:
            if self.growth is not None:
                self.growth.check(state["blocks"], self.plan.names)
            self._order.jump(state.get("window", {}))

    def refresh(self) -> int | None:
        """Take over changes of the mixture that were fixed since; return the first step that may differ.

        They take effect at steps that no rank has read yet.

        Raises:
            StoreFailedError: If the store stays away.
        """
        if self.amendments is None:
            return None
        newest = self.amendments.read()
        with self._lock:
            from_step = self.amendments.take(newest)
            if newest is None or from_step is None:
                return None
            self.plan, self.identity = self.amendments.remake(self.plan, newest)
            self._order.amend(self.plan, from_step=from_step)
            for step in [step for step in self._assigned if step >= from_step]:
                del self._assigned[step]
            return from_step

    def _grow(self, known: OrderPlan) -> bool:
        """Take over blocks that were sealed since; return whether the plan is another than the known one.

        The journal is read without the order's lock: threads that need sealed steps alone do not wait for a bucket.
        """
        if self.growth is None:
            return False
        with self._growth_lock:
            if self.plan is known:
                self.growth.look()
            with self._lock:
                if self.growth.ends != self.plan.blocks:
                    lengths = tuple(index.lengths for index in self.indexes)
                    self.plan = dataclasses.replace(self.plan, lengths=lengths, blocks=self.growth.ends)
                    self._order.extend(self.plan)
                return self.plan is not known

    def _numbered(self, step: int, packs: Sequence[Sequence[Slot]]) -> Packs:
        """Number the packs of a step as the trainer does; where they are balanced, null packs are among them."""
        if self.balance is None:
            return packs
        if step not in self._assigned:
            costs = self._costs(packs, self.pack_tokens_in(step), self.balance.shape)
            self._assigned[step] = assign_packs(costs, self.balance.split)
            while len(self._assigned) > ASSIGNED_STEPS_MAX:
                self._assigned.popitem(last=False)
        return [packs[number] if number < len(packs) else None for number in self._assigned[step]]

    def _costs(self, packs: Sequence[Sequence[Slot]], tokens: int, shape: ModelShape) -> list[int]:
        """Count what differs between packs, as the index has them: a damaged sample costs what it would have."""
        costs: list[int] = []
        for slots, grids_I2 in zip(packs, self.grids(packs), strict=True):
            lengths = [int(self.indexes[slot.source].lengths[slot.sample]) for slot in slots]
            branched = [self._branches(slot, length) for slot, length in zip(slots, lengths, strict=True)]
            documents = [tokens for parts, _ in branched for tokens in parts]
            images: list[int] = grids_I2.prod(axis=1, dtype=np.int64).tolist()
            shared = [prefix for _, prefix in branched]
            costs.append(uneven_flops(shape, [*documents, tokens - sum(lengths)], images, shared=shared))
        return costs

    def _branches(self, slot: Slot, length: int) -> tuple[list[int], int]:
        """Return the tokens that each branch of a sample attends to, and those of the prefix that two of them share.

        The index has no length of either answer: both are taken as equally long.
        """
        index = self.indexes[slot.source]
        if index.manifest.kind != PREFERENCES:
            return [length], 0
        prefix = index.prompt_tokens(slot.sample) - 1
        half = (length - prefix) // 2
        return [prefix + half, length - half], prefix
