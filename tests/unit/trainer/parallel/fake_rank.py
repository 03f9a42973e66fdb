"""One rank of eight on a fake process group: builds the model, makes one step, prints the bytes that it holds.

Run in a process of its own: a fake group can't be left again without traces.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme_api.store import ObjectStore
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.costs import Recompute
from polyreme_planner.curriculum import CurriculumStage
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO, ModelShape
from polyreme_trainer.model.adapters import is_adapter
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.decoder import Decoded
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.section import sections
from polyreme_trainer.model.tensor import ALONE
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.collectives import sum_over
from polyreme_trainer.parallel.communicators import Communicators
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.mesh import experts_of, open_meshes
from polyreme_trainer.parallel.tensor import TensorGroup
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train.settings import (
    CheckpointSettings,
    OptimizerName,
    OptimizerSettings,
    ParameterSharding,
    Precision,
    TrainSettings,
)
from polyreme_trainer.train.state import let_learn, open_state
from tests.unit.trainer.kept import kept_bytes
from tests.unit.trainer.parallel import fake_start
from tests.unit.trainer.peak import PeakMemory

WIDE = (6, 1, 2)
"""Layers, dense ones of them, and layers of the tower of the model whose weights layouts divide."""
LAYOUTS = (
    (Layout(dp=8), (6,)),
    (Layout(dp=8, ep=8), (6,)),
    (Layout(dp=4, tp=2, ep=4), (6,)),
    (Layout(dp=2, cp=2, tp=2, ulysses=2), (6,)),
    (Layout(dp=2, pp=4, ep=2), (1, 2, 2, 1)),
    (Layout(dp=2, pp=2, tp=2, ep=4), (2, 4)),
)
"""Layouts of eight ranks, and the decoder layers of their stages."""
WORLD, TOKENS, SIDE, MEDIA_TOKEN = 8, 256, 16, 1
HELD = Layout(dp=4, cp=2, ep=2)
"""Layout whose state is counted, by how it is held."""
KINDS = ("whole", "zero1", "muon", "rows", "adapters")
ADAPTERS = Adapters(rank=16, alpha=16.0, targets=frozenset(Target))
ADAPTED = {
    "adapted": ADAPTERS,
    "adapted attention": dataclasses.replace(ADAPTERS, targets=frozenset({Target.ATTENTION})),
}


def shape_of(layers: int, dense_layers: int, tower_layers: int) -> ModelShape:
    """A model whose widths all differ."""
    decoder = dataclasses.replace(
        KIMI_VL_NANO.decoder,
        layers=layers,
        dense_layers=dense_layers,
        width=192,
        heads=6,
        kv_rank=56,
        nope_dim=24,
        rope_dim=16,
        value_dim=20,
        dense_ffn_width=520,
        expert_ffn_width=88,
        experts_per_token=3,
        shared_experts=2,
    )
    return dataclasses.replace(
        KIMI_VL_NANO, decoder=decoder, vision=dataclasses.replace(KIMI_VL_NANO.vision, layers=tower_layers)
    )


def held_bytes(shape: ModelShape, recompute: Recompute) -> dict[str, int]:
    """Make one step; count what autograd keeps after the forward, and the state after the step."""
    torch.manual_seed(0)
    model = KimiVL(shape, media_token=MEDIA_TOKEN, options=ComputeOptions(recompute=recompute))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    hidden: list[Tensor] = []
    activations = kept_bytes(lambda: hidden.append(forward(model)), without=model.parameters())
    loss, _ = token_loss(hidden[0], model.language_model.lm_head.weight, _tokens(shape).roll(-1))
    loss.backward()
    group = open_meshes(Layout(dp=WORLD), Communicators(timeout_s=60)).replica_group
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        assert parameter.grad is not None
        sum_over(parameter.grad, group)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        "optimizer": sum(moment.nbytes for moment in moments),
        "activations": activations,
    }


def _tokens(shape: ModelShape) -> Tensor:
    tokens_T = torch.full((TOKENS,), 5)
    tokens_T[: (SIDE // shape.vision.merge) ** 2] = MEDIA_TOKEN
    return tokens_T


def forward(model: KimiVL) -> Tensor:
    """Run a pack with one image."""
    vision = model.shape.vision
    patches_PC = torch.randn(SIDE * SIDE, vision.channels * vision.patch_px**2)
    tokens_T = _tokens(model.shape)
    decoded: Decoded = model(tokens_T, torch.arange(TOKENS), [0, TOKENS], patches_PC, [(SIDE, SIDE)])
    return decoded.hidden_TD


def adapted_bytes(adapters: Adapters) -> dict[str, int]:
    """Count what autograd keeps after the forward of a model with adapters."""
    model = build_model(shape_of(3, 1, 2), seed=0, media_token=MEDIA_TOKEN, adapters=adapters)
    let_learn(model, CurriculumStage(steps=1))
    hidden: list[Tensor] = []
    return {"activations": kept_bytes(lambda: hidden.append(forward(model)), without=model.parameters())}


def weight_bytes(layout: Layout, split: tuple[int, ...]) -> int:
    """Build each stage of a layout without memory, as the first of its ranks would; return the fullest one's weights.

    One stage a pipeline rank.
    """
    shape, meshes = shape_of(*WIDE), open_meshes(layout, Communicators(timeout_s=60))
    edges = itertools.pairwise(itertools.accumulate(split, initial=0))
    held = []
    for section in sections(shape, list(edges)):
        with torch.device("meta"):
            model = KimiVL(
                shape,
                media_token=MEDIA_TOKEN,
                section=section,
                experts_local=experts_of(layout, 0, shape.decoder.experts),
                dispatcher=AllToAllDispatcher(meshes.ep_group) if layout.ep > 1 else None,
                ranks=TensorGroup(meshes.tp_group) if layout.tp > 1 else ALONE,
            )
        held.append(sum(parameter.nbytes for parameter in model.parameters()))
    return max(held)


def state_bytes(layout: Layout, kind: str) -> dict[str, int]:
    """Open a rank's whole state in bfloat16; count what it holds of weights, gradients and the optimizer's numbers."""
    shape, meshes = shape_of(*WIDE), open_meshes(layout, Communicators(timeout_s=60))
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=WORLD, attempt=1),
        layout=layout,
        shape=shape,
        steps=1,
        checkpoint=CheckpointSettings(store=cast("ObjectStore", None)),
        precision=Precision.BFLOAT16,
        adapters=ADAPTERS if kind == "adapters" else None,
        parameter_sharding=ParameterSharding.FSDP2 if kind == "rows" else ParameterSharding.NONE,
        optimizer=OptimizerSettings(
            name=OptimizerName.MUON if kind == "muon" else OptimizerName.ADAMW, zero1=kind == "zero1"
        ),
    )
    memory = PeakMemory("cpu")
    with memory:
        state = open_state(settings, meshes, media_token=MEDIA_TOKEN)
    parts = state.flat.parts
    rows = sum(piece.length for part in state.flat.sharded for piece in part.pieces)
    models = [stage.model for stage in state.stages.values() if kind == "adapters"]
    frozen = [p for model in models for name, p in model.named_parameters() if not is_adapter(name)]
    own = sum(part.own_gradients.nbytes for part in parts if part.shares.count > 1)
    moments = sum(buffer.nbytes for of in state.optimizer.states for _, buffer, _ in of.buffers())
    return {
        "weights": sum(part.values.nbytes for part in parts) + 4 * rows + sum(parameter.nbytes for parameter in frozen),
        "gradients": own + sum(part.gradients.nbytes for part in parts if part not in state.flat.sharded),
        "optimizer": moments + sum(part.masters.nbytes for part in parts if part.masters is not None),
        "peak": memory.peak_bytes,
    }


def main() -> None:
    """Print what each of the shapes named on the command line holds, ``layers-dense-tower-recompute``.

    And, under the name of each layout, the weights of its fullest rank; of some, its state by how it is held; of
    some presets, the start of one of 1,024 ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = {}
    for name in sys.argv[1:]:
        *sizes, recompute = name.split("-")
        found[name] = held_bytes(shape_of(*map(int, sizes)), Recompute(recompute))
    for kind, adapters in ADAPTED.items():
        found[kind] = adapted_bytes(adapters)
    for layout, split in LAYOUTS:
        found[str(layout)] = {"weights": weight_bytes(layout, split)}
    for kind in KINDS:
        found[kind] = state_bytes(HELD, kind)
    dist.destroy_process_group()
    fake_start.open_fake_world()
    for name, (shape, layout) in fake_start.STARTS.items():
        found[f"start {name}"] = {"counted": fake_start.counted_bytes(fake_start.shallow(shape, layout), layout)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
