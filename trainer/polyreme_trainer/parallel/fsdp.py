"""Sharded parameters, some rows on every rank: torch's ``fully_shard`` (FSDP2, arXiv:2304.11277), optional.

A module whose parameters are gathered at once is a **unit**: a decoder layer, its experts, a block of the tower, its
patch embedding, its last norm, the projector, the embedding, the head. Before a unit runs, forward and backward, its
ranks gather its parameters; after it they keep only their rows, and its gradients are summed into the owners' rows.
Inside a module, parameters are plain tensors, so the model knows nothing of all this.

* Experts are sharded over the ranks that hold the same ones (edp), everything else over dp x cp. With tensor
  parallelism the slices are sharded; what tensor ranks hold whole stays whole.
* The router's weights, which must be float32 even if everything else is narrower, and the final norm, which is no unit,
  stay whole on every rank. They stay in flat buffers (``flat_buffers.py``), whose sum carries the step's scalars too.
* Rows are kept in float32, whatever the model computes in: they are the originals that the optimizer changes. Gathered
  rows have the type of the computation. Gradients are summed in float32.
* **Sums, not means**: ranks back-propagate sums over their tokens and divide once at the end (``gradients.py``).
* Rows are gathered again for every microbatch, forward and backward, and gradients are summed after every one: a rank
  holds one whole unit at a time, not the model. Head and embedding are not gathered for the backward pass, which does
  not read them.

The first ``DTensor`` imports torch's compiler, which takes seconds: a job without sharded parameters makes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from polyreme_trainer.model.initialise import STACKED, Rows
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.sharding import cut_of
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.communicators import Wanted
from polyreme_trainer.parallel.flat_buffers import FlatParameters, Named
from polyreme_trainer.parallel.flat_layout import Bucket, Piece, Shares, Slot
from polyreme_trainer.parallel.fsdp_exchanges import record_exchanges
from polyreme_trainer.parallel.mesh import Meshes, share_groups

_ALIGNMENT = 16
"""Elements to which a parameter's rows are aligned in the buffers of gradients and moments."""
_WHOLE = (".mlp.gate.weight", "language_model.model.norm.weight")
"""Suffixes of the names of parameters that are in no unit: routers, whose scores are float32, and the final norm."""
_ROW_AXES = {"dense_rows": ("dp", "cp"), "expert_rows": ("edp",)}
"""Axes over which rows are sharded: of experts, and of everything else."""


class ShardedParameters(FlatParameters):
    """Rows of parameters that the ranks of one group share; the optimizer and a checkpoint see pieces of a buffer.

    The buffer itself does not exist: in it parameters follow one another, each whole, and a piece is this rank's rows
    of one. Only the rows, each in its own parameter, and one buffer of their gradients exist.
    """

    def __init__(self, named: Sequence[Named], group: dist.ProcessGroup) -> None:
        """Give each parameter a gradient that lies in one buffer with all others.

        Args:
            named: Parameters by their global names, sharded over the group and materialised.
            group: The ranks that share them.
        """
        self.group = group
        self.shares = Shares(count=dist.get_world_size(group), place=dist.get_rank(group))
        self.buckets: tuple[Bucket, ...] = ()
        self.masters: Tensor | None = None
        self.whole_end, self.own_whole_length = 0, 0
        matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
        vectors = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
        slots, pieces, rows = [], [], []
        start = own = 0
        for name, parameter in (*matrices, *vectors):
            slot = Slot(name=name, start=start, shape=tuple(parameter.shape))
            kept, first = rows_of(parameter)
            width = slot.length // slot.shape[0]
            start += slot.length
            slots.append(slot)
            if kept.numel():
                bucket = Bucket(start=slot.start, length=slot.length)
                pieces.append(Piece(bucket=bucket, start=slot.start + first * width, length=kept.numel(), own=own))
                rows.append(kept.view(-1))
                own += -(-kept.numel() // _ALIGNMENT) * _ALIGNMENT
        self.slots, self.length, self.own_length = tuple(slots), start, own
        self.matrices_end = sum(slot.length for slot in slots[: len(matrices)])
        self.pieces = tuple(pieces)
        self._rows = {piece.start: kept for piece, kept in zip(pieces, rows, strict=True)}
        self._parameters = [parameter for _, parameter in (*matrices, *vectors)]
        self.values = rows[0][:0] if rows else torch.zeros(0)
        self._own = torch.zeros(own, device=self.values.device)
        self._keep_gradients()

    @property
    def own_gradients(self) -> Tensor:
        """Summed gradients of this rank's rows, one parameter after another."""
        return self._own

    def memory(self) -> list[Tensor]:
        """Return this rank's rows, flat."""
        return list(self._rows.values())

    def own_values(self, piece: Piece) -> Tensor:
        """Return this rank's rows of a parameter, which the optimizer changes."""
        return self._rows[piece.start]

    def put(self, slot: Slot, first: int, rows: Tensor) -> None:
        """Set rows of a parameter, those of this rank."""
        self.put_own(slot.row_start(first), rows.reshape(-1))

    def publish(self, piece: Piece, updated: Tensor | None = None) -> None:
        """Do nothing: rows are gathered again when they are next needed."""

    def clear_gradients(self) -> None:
        """Set gradients to zero, before a step's first backward pass."""
        self._own.zero_()

    def _keep_gradients(self) -> None:
        """Let gradients accumulate in the buffer: torch adds to a gradient that exists."""
        held = {piece.bucket.start: piece.of_own(self._own) for piece in self.pieces}
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            kept, _ = rows_of(parameter)
            mine = held[slot.start].view(kept.shape) if slot.start in held else torch.zeros_like(kept)
            parameter.grad = DTensor.from_local(
                mine,
                _sharded(parameter).device_mesh,
                _sharded(parameter).placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


def is_sharded(parameter: Tensor) -> bool:
    """Return whether this rank holds only some rows of a parameter."""
    return isinstance(parameter, DTensor)


def rows_of(parameter: Tensor) -> Rows:
    """Return the rows of a parameter that lie here, in the memory where they are kept, and the number of the first.

    Rows are split into equal runs; the last ones are shorter or empty.
    """
    if not is_sharded(parameter):
        return parameter.detach(), 0
    sharded = _sharded(parameter)
    with torch.no_grad():
        own = sharded.to_local()
    return own, min(_run(sharded) * sharded.device_mesh.get_local_rank(), parameter.shape[0])


def gather_rows(parameter: Tensor) -> Tensor:
    """Gather all rows of a sharded parameter, on every rank that shares it."""
    sharded = _sharded(parameter)
    own, _ = rows_of(parameter)
    padded = own.new_zeros(_run(sharded), *parameter.shape[1:])
    padded[: own.shape[0]] = own
    return collectives.gather_slices(padded, sharded.device_mesh.get_group())[: parameter.shape[0]]


def _sharded(parameter: Tensor) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a parameter of {tuple(parameter.shape)} is not sharded: its rows were asked for")
    return parameter


def _run(sharded: DTensor) -> int:
    """Rows that each rank holds, except the last ones."""
    return -(-sharded.shape[0] // sharded.device_mesh.size())


def whole_names(names: Sequence[str], *, tensor_parallel: bool) -> frozenset[str]:
    """Name the parameters that stay whole on all ranks."""
    return frozenset(
        name
        for name in names
        if name.endswith(_WHOLE) or (tensor_parallel and cut_of(name) is None and not name.endswith(STACKED))
    )


def row_groups(meshes: Meshes) -> list[Wanted]:
    """Return the groups for gathering and summing rows, apart from the layers' since both exchange at the same time."""
    return share_groups(meshes.layout, meshes.rank, _ROW_AXES)


def shard(
    stages: Mapping[int, Stage],
    meshes: Meshes,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    groups: Mapping[str, dist.ProcessGroup],
) -> tuple[ShardedParameters, ...]:
    """Shard the parameters of models that are not on a device yet; every rank calls it.

    Rows are allocated, without values; parameters that stay whole remain on the device ``meta``.

    Args:
        stages: This rank's, built on the device ``meta``.
        meshes: This rank's place.
        dtype: Type in which the model computes.
        device: Where parameters shall be.
        groups: Those of ``row_groups``.

    Returns:
        Sharded parameters: over dp x cp, and over the copies of experts.
    """
    sharing = [
        DeviceMesh.from_group(groups[name], torch.device(device).type) if name in groups else None for name in _ROW_AXES
    ]
    shared = any(mesh is not None for mesh in sharing)
    parts: list[list[Named]] = [[], []]
    for stage in stages.values():
        if shared:
            _shard_stage(stage, *sharing, dtype=dtype, tensor_parallel=meshes.layout.tp > 1)
        stage.model.computes_in = dtype
        if shared:
            _allocate_rows(stage, device)
            _begin(stage)
        for name, parameter in stage.model.named_parameters():
            if is_sharded(parameter):
                parts[name.endswith(STACKED)].append((name, parameter))
    return tuple(
        ShardedParameters(named, mesh.get_group())
        for named, mesh in zip(parts, sharing, strict=True)
        if named and mesh is not None
    )


def _shard_stage(
    stage: Stage, dense: DeviceMesh | None, experts: DeviceMesh | None, *, dtype: torch.dtype, tensor_parallel: bool
) -> None:
    named = dict(stage.model.named_parameters())
    whole = whole_names(list(named), tensor_parallel=tensor_parallel)
    ignored = {named[name] for name in whole}
    # Experts without copies are not sharded over other ranks either.
    ignored |= {parameter for name, parameter in named.items() if name.endswith(STACKED)} if experts is None else set()
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for unit, mesh in _units(stage.model, dense, experts):
        if any(parameter not in ignored for parameter in unit.parameters()):
            fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    # The root holds no parameters: it only orders the others.
    fully_shard(stage, mesh=dense or experts, mp_policy=policy, ignored_params=set(named.values()))
    for unit in stage.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo can't scale, and nothing needs scaling
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            record_exchanges(unit)
    for unit in _read_in_forward(stage.model):
        if isinstance(unit, FSDPModule):
            unit.set_unshard_in_backward(False)


def _units(
    model: KimiVL, dense: DeviceMesh | None, experts: DeviceMesh | None
) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Yield the units that are gathered at once, inner units first, with the ranks that share them."""
    decoder = model.language_model.model
    for layer in decoder.layers.values():
        mixture = layer.get_submodule("mlp")
        if experts is not None and isinstance(mixture, MixtureOfExperts):
            yield mixture.experts, experts
        if dense is not None:
            yield layer, dense
    if dense is None:
        return
    if model.section.first:
        if model.shape.sees:
            tower = model.vision_tower
            yield from ((unit, dense) for unit in (tower.patch_embed, *tower.encoder.blocks, tower.encoder))
            yield model.multi_modal_projector, dense
        yield decoder.embed_tokens, dense
    if model.section.last:
        yield model.language_model.lm_head, dense


def _read_in_forward(model: KimiVL) -> Iterator[nn.Module]:
    """Yield the units whose weights no backward reads: embedding, and the head, whose gradients come with the loss."""
    if model.section.first:
        yield model.language_model.model.embed_tokens
    if model.section.last:
        yield model.language_model.lm_head


def _allocate_rows(stage: Stage, device: torch.device | str) -> None:
    """Give sharded parameters memory for their rows."""
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_sharded(parameter):
                module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device=device)))


def _begin(stage: Stage) -> None:
    """Make the stage the root, even if a part of it is called first: decoding calls it layer by layer."""
    # torch 2.13 does this at the first forward of any module, and has no public name for it.
    fully_shard.state(stage)._lazy_init()  # type: ignore[attr-defined]  # noqa: SLF001
