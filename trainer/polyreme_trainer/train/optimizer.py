"""AdamW (arXiv:1711.05101) and Muon over flat buffers, and the router's bias rule.

``torch.optim.AdamW`` is not used: its first construction imports the compiler (1.5 s from a warm disk cache, 10 s from
a cold one, in each rank or in the parent they are forked from), and its state is keyed by parameter number, which no
other layout could read. The arithmetic is torch's own fused kernel, 0.5 ms for 650 k parameters where the unfused
formula takes 2.3 ms.

A rank keeps state only for what it updates: everything, or its shares of all buckets. AdamW treats each scalar
separately, so the shares together are the whole update bit by bit. Muon needs whole matrices. A share holds whole
matrices (``flat_buffers.py``), so it costs no exchange there; slices of tensor ranks are gathered first, and each rank
of such a group computes the whole direction and keeps its slice. Without shares every copy computes the same
directions.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.curriculum import Learner
from polyreme_trainer.model.sharding import cut_of, join, slice_of
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel, FlatParameters, Storage
from polyreme_trainer.parallel.flat_layout import Piece, Slot
from polyreme_trainer.parallel.zero1 import in_order_of_reads
from polyreme_trainer.train import muon
from polyreme_trainer.train.host_state import BUFFERS, Visits, visit_length
from polyreme_trainer.train.settings import OptimizerSettings

AT_ONCE_SCALARS = 1 << 30
"""Scalars of one call of the fused kernel: on CUDA, some of its releases count in 32 bits, and one buffer with the
experts of a few layers has more scalars."""
MEASURED_AT_ONCE_SCALARS = {"cpu": 1 << 15}
"""Scalars whose update is measured at a time: on a processor, what its cache holds."""
MEASURED_AT_ONCE_DEFAULT = 1 << 24
Updated = Callable[[FlatParameters, Piece], None]


class Kind(enum.StrEnum):
    """Kind of a state buffer; its name in a checkpoint."""

    FIRST = "first"
    """Running mean of the gradient."""
    SECOND = "second"
    """Running mean of its square."""
    MOMENTUM = "momentum"
    """Running sum of the gradient."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """State of what this rank updates of one part, in the order of its pieces."""

    part: FlatParameters
    momentum: Tensor
    """Of matrices that are updated whole."""
    first: Tensor
    """Of everything after them, as ``second``."""
    second: Tensor

    def buffers(self) -> Iterator[tuple[Kind, Tensor, int]]:
        """Yield each buffer with its kind, and the scalar of what this rank updates at which it begins."""
        yield Kind.MOMENTUM, self.momentum, 0
        yield Kind.FIRST, self.first, self.part.own_whole_length
        yield Kind.SECOND, self.second, self.part.own_whole_length


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Scalars of a piece that learn."""

    start: int
    stop: int
    times: int
    """How often they have learned, including this step: for the bias correction."""

    @property
    def cut(self) -> slice:
        return slice(self.start, self.stop)


@dataclasses.dataclass(frozen=True, slots=True)
class _Due:
    """Arguments of a piece's update."""

    rate: float
    scale: float
    runs: Sequence[_Run]


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """One call of AdamW's kernel."""

    part: FlatParameters
    piece: Piece
    rate: float
    scale: float
    times: int
    decay: float


class Optimizer:
    """AdamW with decoupled weight decay on matrices only (norms, biases and other vectors do not decay), or Muon.

    State may live in pinned host memory: it then visits the device (``host_state.py``); of Muon's matrices, those of a
    bucket at a time. Where the model itself is on the host, nothing is copied.
    """

    def __init__(
        self,
        flat: FlatModel,
        settings: OptimizerSettings,
        *,
        tensor_group: dist.ProcessGroup | None = None,
        visits: Visits | None = None,
    ) -> None:
        """Allocate empty state.

        Args:
            flat: Parameters, laid out for this optimizer (``flat_buffers.Update.whole``).
            settings: Rates and decays.
            tensor_group: The ranks that hold the other slices of the tensor-parallel part; None for whole tensors.
            visits: Visits of state in host memory, each of up to ``longest_visit``; None where all state is with the
                model.
        """
        self._settings = settings
        self._sliced = flat.tensor
        self._tensor_group = tensor_group
        self._visits = visits
        self.states = tuple(self._empty(part) for part in flat.parts)
        self._order = in_order_of_reads(flat.parts)
        self._learners = {id(part): _learners(part) for part in flat.parts}
        self.steps = self.steps_before = 0
        """Steps taken: for the bias correction if no curriculum counts how often a part has learned."""

    def _empty(self, part: FlatParameters) -> PartState:
        storage = Storage(device=part.values.device, state_on_host=self._settings.state_on_host)
        lengths = part.own_whole_length, *[part.own_length - part.own_whole_length] * 2
        momentum, first, second = map(storage.state, lengths)
        return PartState(part=part, momentum=momentum, first=first, second=second)

    def step(
        self,
        *,
        learning_rate: float,
        gradient_scale: float,
        learned: Mapping[Learner, int] | None = None,
        updated: Updated | None = None,
    ) -> None:
        """Update this rank's parameters from their summed gradients times ``gradient_scale``; keep the gradients.

        Args:
            learning_rate: Of this step.
            gradient_scale: Factor that turns the sum into the clipped mean.
            learned: How often each part of the model that learns has learned, including this step; weights and state of
                the others stay. None: all of them, at every step.
            updated: Called after each piece, also if it stays; pieces that the next forward pass reads first lead.
        """
        learned = self._next_times(learned)
        self.steps += 1
        if self._visits is not None:
            self._visits.begin()
        for number, piece in self._order:
            state = self.states[number]
            if runs := self._runs(state.part, piece, learned):
                due = _Due(learning_rate, gradient_scale, runs)
                (self._turn if piece.bucket.whole else self._move)(state, piece, due)
            if updated is not None:
                updated(state.part, piece)
        if self._visits is not None:
            self._visits.end()

    def directions(
        self, *, gradient_scale: float, learned: Mapping[Learner, int] | None = None
    ) -> Iterator[tuple[FlatParameters, Tensor]]:
        """Yield what the next step would subtract at a learning rate of one, without decay; nothing changes.

        Only of AdamW: the size of Muon's directions is fixed. Tensors are short, and belong to the caller.

        Args:
            gradient_scale: As for ``step``.
            learned: As for ``step``.
        """
        times = self._next_times(learned)
        for state in self.states:
            part, begin = state.part, state.part.own_whole_length
            device = part.values.device
            at_once = MEASURED_AT_ONCE_SCALARS.get(device.type, MEASURED_AT_ONCE_DEFAULT)
            for piece in part.pieces:
                runs = () if piece.bucket.whole else self._runs(part, piece, times)
                for cut, count, _ in _cuts(runs, decayed=0, weight_decay=0.0, at_once=at_once):
                    first, second = (
                        piece.of_own(of, begin=begin)[cut].to(device, copy=True) for of in (state.first, state.second)
                    )
                    direction = torch.zeros_like(first)
                    gradients = piece.of_own(part.own_gradients)[cut].clone()  # the kernel scales them in place
                    change = _Change(part, piece, 1.0, gradient_scale, count, 0.0)
                    _fused(self._settings, change, gradients, (direction, first, second))
                    yield part, direction.neg_()

    def _next_times(self, learned: Mapping[Learner, int] | None) -> dict[Learner, int]:
        """Return how often each part that learns will have learned after the next step, for the bias correction."""
        counted = dict.fromkeys(Learner, self.steps + 1) if learned is None else learned
        return {learner: self.steps_before + times for learner, times in counted.items()}

    def _runs(self, part: FlatParameters, piece: Piece, learned: Mapping[Learner, int]) -> list[_Run]:
        """Return the scalars of a piece that learn; neighbours that have learned equally often are one run."""
        runs: list[_Run] = []
        for start, stop, learner in self._learners[id(part)]:
            begin, end = max(start - piece.start, 0), min(stop - piece.start, piece.length)
            times = learned.get(learner)
            if begin >= end or times is None:
                continue
            if runs and runs[-1].stop == begin and runs[-1].times == times:
                begin = runs.pop().start
            runs.append(_Run(begin, end, times))
        return runs

    def settle(self) -> None:
        """Wait until state in host memory is up to date with the last step."""
        if self._visits is not None:
            self._visits.settle()

    def _update(self, homes: Sequence[Tensor], update: Callable[..., None]) -> None:
        """Update tensors in place: where they are, or while they visit the device."""
        if self._visits is None:
            update(*homes)
        else:
            self._visits.update(homes, update)

    def _move(self, state: PartState, whole: Piece, due: _Due) -> None:
        """AdamW, in at least two calls per run: one for scalars with decay, one for those without."""
        part, settings, begin = state.part, self._settings, state.part.own_whole_length
        decayed = min(max(part.matrices_end - whole.start, 0), whole.length)
        at_once = AT_ONCE_SCALARS if self._visits is None else _visit_scalars(settings)
        for cut, times, decay in _cuts(due.runs, decayed=decayed, weight_decay=settings.weight_decay, at_once=at_once):
            piece = dataclasses.replace(
                whole, start=whole.start + cut.start, length=cut.stop - cut.start, own=whole.own + cut.start
            )
            moments = (piece.of_own(of, begin=begin) for of in (state.first, state.second))
            # Of the whole piece: rows of a sharded parameter are identified by where they begin.
            homes = [part.own_values(whole)[cut], *moments]
            change = _Change(part, piece, due.rate, due.scale, times, decay)
            self._update(homes, functools.partial(_adamw, settings, change))

    def _turn(self, state: PartState, piece: Piece, due: _Due) -> None:
        """Muon: momentum scalar by scalar, then directions matrix by matrix."""
        homes = [state.part.own_values(piece), piece.of_own(state.momentum)]
        self._update(homes, functools.partial(self._muon, state.part, piece, due))

    def _muon(self, part: FlatParameters, piece: Piece, due: _Due, values: Tensor, momentum: Tensor) -> None:
        settings, gradients = self._settings, piece.of_own(part.own_gradients)
        for run in due.runs:
            momentum[run.cut].mul_(settings.momentum).add_(gradients[run.cut], alpha=due.scale)
            values[run.cut].mul_(1.0 - due.rate * settings.weight_decay)
        ahead = (gradients * due.scale).add_(momentum, alpha=settings.momentum)  # Nesterov
        for slot, direction in self._directions(part, piece, ahead, due.runs):
            place = slot.start - piece.start
            rows, columns = muon.matrices_of(slot.name, direction).shape[1:]
            size = due.rate * muon.step_size(rows, columns)
            own = self._own_slice(part, slot, direction)
            values[place : place + slot.length].view(slot.shape).add_(own, alpha=-size)
        part.publish(piece, values)

    def _directions(
        self, part: FlatParameters, piece: Piece, ahead: Tensor, runs: Sequence[_Run]
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Compute the direction of each whole parameter of a piece that learns, matrices of one shape in one batch."""
        slots = [slot for slot in part.slots if any(run.start <= slot.start - piece.start < run.stop for run in runs)]
        wholes = self._wholes(part, piece, slots, ahead)
        alike: dict[tuple[int, int], list[tuple[Slot, Tensor]]] = defaultdict(list)
        for slot, whole in zip(slots, wholes, strict=True):
            matrices_BMN = muon.matrices_of(slot.name, whole)
            alike[matrices_BMN.shape[1], matrices_BMN.shape[2]].append((slot, whole))
        # bfloat16 is enough for a direction; on CPUs it is slower, and float32 makes all layouts agree.
        dtype = torch.bfloat16 if ahead.device.type == "cuda" else torch.float32
        for group in alike.values():
            batches = [muon.matrices_of(slot.name, whole) for slot, whole in group]
            turned = muon.orthogonal(torch.cat(batches), dtype=dtype).split([batch.shape[0] for batch in batches])
            for (slot, whole), direction_BMN in zip(group, turned, strict=True):
                yield slot, direction_BMN.reshape(whole.shape)

    def _wholes(self, part: FlatParameters, piece: Piece, slots: Sequence[Slot], ahead: Tensor) -> list[Tensor]:
        def of(buffer: Tensor, slot: Slot) -> Tensor:
            place = slot.start - piece.start
            return buffer[place : place + slot.length].view(slot.shape)

        if part is not self._sliced.flat or self._tensor_group is None:
            return [of(ahead, slot) for slot in slots]
        gathered = collectives.gather_slices(ahead.unsqueeze(0), self._tensor_group)
        return [
            of(ahead, slot) if (cut := cut_of(slot.name)) is None else join([of(row, slot) for row in gathered], cut)
            for slot in slots
        ]

    def _own_slice(self, part: FlatParameters, slot: Slot, direction: Tensor) -> Tensor:
        cut, slices = cut_of(slot.name), self._sliced.slices
        if part is not self._sliced.flat or self._tensor_group is None or cut is None:
            return direction
        return slice_of(direction, cut, place=slices.place, parts=slices.count)


def learner_of(name: str) -> Learner:
    """Return the part of the model that a parameter belongs to."""
    prefix = name.partition(".")[0]
    return {"vision_tower": Learner.TOWER, "multi_modal_projector": Learner.PROJECTOR}.get(prefix, Learner.DECODER)


def _learners(part: FlatParameters) -> list[tuple[int, int, Learner]]:
    """Return the scalars of a buffer in each part of the model; a gap belongs to the parameter before it."""
    slots = sorted(part.slots, key=lambda slot: slot.start)
    stops = [*(slot.start for slot in slots[1:]), part.length]
    found: list[tuple[int, int, Learner]] = []
    for slot, stop in zip(slots, stops, strict=False):
        start = found[-1][1] if found else 0
        learner = learner_of(slot.name)
        if found and found[-1][2] is learner:
            start = found.pop()[0]
        found.append((start, stop, learner))
    return found


def _cuts(
    runs: Sequence[_Run], *, decayed: int, weight_decay: float, at_once: int
) -> Iterator[tuple[slice, int, float]]:
    """Cut runs where decay ends and at the kernel's maximum; yield scalars, how often they learned, and their decay."""
    for run in runs:
        border = min(max(decayed, run.start), run.stop)
        for start, stop, decay in ((run.start, border, weight_decay), (border, run.stop, 0.0)):
            for at in range(start, stop, at_once):
                yield slice(at, min(at + at_once, stop)), run.times, decay


def _adamw(settings: OptimizerSettings, change: _Change, values: Tensor, first: Tensor, second: Tensor) -> None:
    """Update values and moments in place, and publish the values."""
    _fused(settings, change, change.piece.of_own(change.part.own_gradients), (values, first, second))
    change.part.publish(change.piece, values)


def _fused(
    settings: OptimizerSettings, change: _Change, gradients: Tensor, updated: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Update values and both moments in place, by torch's fused kernel."""
    values, first, second = updated
    torch._fused_adamw_(
        [values],
        [gradients],
        [first],
        [second],
        [],
        [torch.full((), float(change.times), device=values.device)],
        lr=change.rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=change.decay,
        eps=settings.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.full((), 1.0 / change.scale, device=values.device),
        found_inf=None,
    )


def _visit_scalars(settings: OptimizerSettings) -> int:
    """Return scalars of one visit to the device: all visits that are there at a time have as many as one exchange."""
    return max(1, min(AT_ONCE_SCALARS, settings.bucket_scalars) // BUFFERS)


def longest_visit(parts: Sequence[FlatParameters], settings: OptimizerSettings) -> int:
    """Return numbers of the largest visit: values and both moments of AdamW, values and momentum of whole matrices."""
    most = _visit_scalars(settings)
    lengths = [
        [piece.length] * 2 if piece.bucket.whole else [min(piece.length, most)] * 3
        for part in parts
        for piece in part.pieces
    ]
    return max(map(visit_length, lengths), default=0)


def update_router_biases(biases: Sequence[Tensor], loads_ME: Tensor, *, rate: float) -> None:
    """Move each expert's bias by ``rate``: up where it got less than the mean, down where more (arXiv:2408.15664).

    Args:
        biases: One bias_E for each layer with experts, in the order of the layers, changed in place.
        loads_ME: Tokens of the whole step that went to each expert of each such layer.
        rate: Step of the bias (DeepSeek-V3, arXiv:2412.19437, section 4.2: 0.001).

    Raises:
        InvalidConfigError: If there are not as many loads as biases.
    """
    if len(biases) != loads_ME.shape[0]:
        raise InvalidConfigError(
            f"loads do not fit the model: {loads_ME.shape[0]} layers, it has {len(biases)} routers"
        )
    # In double precision: a rounded mean of integers would move experts whose load is even.
    loads_ME = loads_ME.double()
    signs_ME = torch.sign(loads_ME.mean(dim=1, keepdim=True) - loads_ME)
    for bias_E, sign_E in zip(biases, signs_ME, strict=True):
        bias_E.add_(sign_E, alpha=rate)
