"""A nano model with weights so large that a wrong convention shows, a packed batch, and transformers' own classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme_planner.shapes import KIMI_VL_NANO, ModelShape
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.moe import Router
from polyreme_trainer.model.patch_grid import Grid
from polyreme_trainer.model.vlm import KimiVL

MEDIA = 1
TOWER_NAMES = (
    ("encoder.blocks.", "layers."),
    ("encoder.final", "final"),
    ("pos_emb.weight", "pos_emb.position_embeddings"),
    ("wo.", "attn.proj."),
    ("norm1.", "norm2."),
    ("norm0.", "norm1."),
    ("mlp.fc1.", "mlp.fc2."),
    ("mlp.fc0.", "mlp.fc1."),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some packed documents with their images."""

    tokens_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    offsets: list[int]
    patches_PC: Tensor
    grids: list[Grid]

    def document(self, index: int, images: slice) -> Batch:
        """One document with its images, alone."""
        start, end = self.offsets[index], self.offsets[index + 1]
        first = sum(rows * columns for rows, columns in self.grids[: images.start])
        count = sum(rows * columns for rows, columns in self.grids[images])
        return Batch(
            tokens_T=self.tokens_T[start:end],
            targets_T=self.targets_T[start:end],
            positions_T=self.positions_T[start:end],
            offsets=[0, end - start],
            patches_PC=self.patches_PC[first : first + count],
            grids=self.grids[images],
        )


def make_batch(lengths: list[int], images: list[list[Grid]], *, seed: int = 0) -> Batch:
    """Random documents; document i holds the images ``images[i]``, each a run of media tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(2, KIMI_VL_NANO.decoder.vocabulary, (sum(lengths),), generator=generator)
    offsets = [0]
    for length, grids in zip(lengths, images, strict=True):
        place = offsets[-1] + 1
        for rows, columns in grids:
            tokens_T[place : place + rows * columns // 4] = MEDIA
            place += rows * columns // 4 + 1
        offsets.append(offsets[-1] + length)
    targets_T = torch.randint(2, KIMI_VL_NANO.decoder.vocabulary, (sum(lengths),), generator=generator)
    targets_T[torch.rand(targets_T.shape, generator=generator) < 0.5] = -100
    flat = [grid for grids in images for grid in grids]
    patches = sum(rows * columns for rows, columns in flat)
    return Batch(
        tokens_T=tokens_T,
        targets_T=targets_T,
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        offsets=offsets,
        patches_PC=torch.randn(patches, 588, generator=generator),
        grids=flat,
    )


def loud_model(shape: ModelShape = KIMI_VL_NANO, *, seed: int = 3) -> KimiVL:
    """Sharp attention, uneven experts, moving norms: at default weights a wrong rotation moves outputs by 1e-6 only."""
    model = build_model(shape, seed=seed, media_token=MEDIA)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or "norm" in name.rsplit(".", 2)[-2]:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith(".bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif name.startswith("language_model.model.layers"):
                parameter.mul_(0.1 / shape.decoder.initializer_range)
            elif name.endswith("wqkv.weight"):
                parameter[: 2 * shape.vision.width].mul_(1.5)
            elif name.endswith("pos_emb.weight"):
                parameter.mul_(0.5 / shape.decoder.initializer_range)
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.e_score_correction_bias.copy_(0.1 * torch.randn(shape.decoder.experts, generator=generator))
    return model


def vision_part(model: KimiVL, *, deinterleave: bool = True) -> dict[str, Tensor]:
    """The tower's weights for transformers' K2.5 tower, which rotates halves and not interleaved pairs."""
    heads = model.shape.vision.heads
    renamed: dict[str, Tensor] = {}
    for ours, tensor in model.vision_tower.state_dict().items():
        name = ours
        for old, new in TOWER_NAMES:
            name = name.replace(old, new)
        if "wqkv" not in name:
            renamed[name] = tensor
            continue
        for part, rows in zip(("q", "k", "v"), tensor.chunk(3), strict=True):
            halves = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            renamed[name.replace("wqkv", f"attn.{part}_proj")] = halves if part != "v" and deinterleave else rows
    return renamed


def reference_vision_config(shape: ModelShape) -> Any:
    """Configuration of transformers' K2.5 tower at the same sizes."""
    from transformers.models.kimi_k25 import Kimi_K25VisionConfig

    vision = shape.vision
    return Kimi_K25VisionConfig(
        patch_size=vision.patch_px,
        pos_emb_height=vision.position_rows,
        pos_emb_width=vision.position_rows,
        num_attention_heads=vision.heads,
        num_hidden_layers=vision.layers,
        hidden_size=vision.width,
        intermediate_size=vision.ffn_width,
        merge_kernel_size=(vision.merge, vision.merge),
        rope_parameters={"rope_type": "axial", "rope_theta": vision.rope_theta},
    )


def reference_text(model: KimiVL, state: Mapping[str, Tensor] | None = None) -> Any:
    """``DeepseekV3ForCausalLM`` with the decoder's weights, or with ``state``."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**text_config(model.shape.decoder))
    config._experts_implementation = "grouped_mm"
    reference = DeepseekV3ForCausalLM(config)
    reference.load_state_dict(dict(state or text_part(model.state_dict())), strict=True)
    return reference.eval()


def reference_vision(model: KimiVL, *, deinterleave: bool = True) -> Any:
    """``Kimi_K25VisionModel`` with the tower's weights."""
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

    reference = Kimi_K25VisionModel(reference_vision_config(model.shape))
    reference.load_state_dict(vision_part(model, deinterleave=deinterleave), strict=True)
    return reference.eval()


def reference_vlm(model: KimiVL) -> Any:
    """``Kimi_K25ForConditionalGeneration`` with all weights."""
    from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = Kimi_K25Config(
        text_config=DeepseekV3Config(**text_config(model.shape.decoder)),
        vision_config=reference_vision_config(model.shape),
        projection_hidden_size=model.shape.vision.width,
        image_token_id=MEDIA,
        tie_word_embeddings=False,
    )
    reference = Kimi_K25ForConditionalGeneration(config)
    state = {f"model.vision_tower.{name}": tensor for name, tensor in vision_part(model).items()}
    for name, tensor in model.multi_modal_projector.state_dict().items():
        renamed = name.replace("linear_1", "in_proj").replace("linear_2", "out_proj")
        state[f"model.mm_projector.{renamed}"] = tensor
    for name, tensor in model.language_model.state_dict().items():
        state[name if name.startswith("lm_head") else f"model.language_model.{name.removeprefix('model.')}"] = tensor
    reference.load_state_dict(state, strict=True)
    return reference.eval()


@pytest.fixture
def batch() -> Batch:
    """Four documents with 0, 1 and 2 images."""
    return make_batch([14, 9, 21, 6], [[(2, 4)], [], [(4, 4), (2, 6)], [(2, 2)]])


@pytest.fixture
def model() -> KimiVL:
    """A nano model with loud weights."""
    return loud_model()


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    """Make other batches."""
    return make_batch


@pytest.fixture
def model_of() -> Callable[..., KimiVL]:
    """Make other models with loud weights."""
    return loud_model


@dataclasses.dataclass(frozen=True, slots=True)
class References:
    """The same weights in classes that we did not write."""

    text: Callable[..., Any] = reference_text
    vision: Callable[..., Any] = reference_vision
    vlm: Callable[..., Any] = reference_vlm


@pytest.fixture(scope="session")
def references() -> References:
    """Build references from a model."""
    return References()
