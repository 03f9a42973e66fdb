"""MoonViT (Kimi-VL, arXiv:2504.07491, section 2.1): a vision transformer over packed patches at native resolution.

Learned positions are interpolated (bicubic) to each image's grid, and queries and keys are rotated by row and column.
Attention is full within an image and never crosses images. Parameter names are those of the Kimi-VL checkpoints.

Tensor-parallel ranks share heads and feed-forward. Between them each holds as many patches as the others, whole merged
cells; if the number is not even, padding follows the last image. It reaches no attention and no token.

Legend: P patches of all images, S those of this rank between layers, padding included (all without tensor parallelism),
C values of one patch (channel, row, column), W tower width, H heads, Q head width, M merged tokens, G patches of a
merged token, B taps, F rotary pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import VisionShape
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.patch_grid import Grid, GridTables, packed_tables
from polyreme_trainer.model.recompute import recomputable, run_layer
from polyreme_trainer.model.rotary import patch_turns, rotate
from polyreme_trainer.model.segment_attention import Attend, segments
from polyreme_trainer.model.tensor import ALONE, TensorRanks, row_product, share
from polyreme_trainer.model.transfer import on_device


class PositionTable(nn.Module):
    """Learned absolute positions, interpolated between their cells."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.position_rows, shape.position_rows, shape.width))

    def forward(self, tap_PB: Tensor, weight_PB: Tensor) -> Tensor:
        """Sum the weighted cells around each patch."""
        table = self.weight.flatten(0, 1)
        weight_PB = weight_PB.to(table.dtype)
        out_PW: Tensor = F.embedding_bag(tap_PB, table, per_sample_weights=weight_PB, mode="sum")
        return out_PW


def normalised(pixels_PC: Tensor) -> Tensor:
    """Normalise bytes of pixels: mean 0.5, deviation 0.5, as Kimi-VL's image processor."""
    return pixels_PC.to(torch.float32).sub_(127.5).div_(127.5)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, so one product of flattened patches, plus positions."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(shape.channels, shape.width, kernel_size=shape.patch_px, stride=shape.patch_px)
        self.pos_emb = PositionTable(shape)

    def forward(self, patches_PC: Tensor, tap_PB: Tensor, weight_PB: Tensor) -> Tensor:
        """Embed patches (channel-major; bytes of pixels, which are normalised here, or normalised floats)."""
        if patches_PC.dtype == torch.uint8:
            patches_PC = normalised(patches_PC)
        patches_PC = patches_PC.to(self.proj.weight.dtype)
        embedded_PW = F.linear(patches_PC, self.proj.weight.flatten(1), self.proj.bias)
        position_PW: Tensor = self.pos_emb(tap_PB, weight_PB)
        return embedded_PW + position_PW


class VisionFeedForward(nn.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, shape: VisionShape, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        inner = share(shape.ffn_width, ranks, what="the tower's feed-forward width")
        self.fc0 = nn.Linear(shape.width, inner)
        self.fc1 = nn.Linear(inner, shape.width)

    def forward(self, x_SW: Tensor) -> Tensor:
        """Apply to each row that this rank holds between layers."""
        inner = recomputable(_gelu, self.fc0(self.ranks.gather(x_SW)))
        return row_product(inner, self.fc1, self.ranks)


class VisionBlock(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, shape: VisionShape, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.heads = share(shape.heads, ranks, what="the tower's heads")
        own = self.heads * shape.head_dim
        self.norm0 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.wqkv = nn.Linear(shape.width, 3 * own)
        self.wo = nn.Linear(own, shape.width)
        self.mlp = VisionFeedForward(shape, ranks)

    def forward(self, x_SW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        """Return the stream after this block."""
        x_SW = x_SW + self._attention(recomputable(self.norm0, x_SW), turn_PF, attend)
        out_SW: Tensor = x_SW + self.mlp(recomputable(self.norm1, x_SW))
        return out_SW

    def _attention(self, x_SW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        gathered = self.ranks.gather(x_SW)
        padding = gathered.shape[0] - turn_PF.shape[0]
        qkv_PW = self.wqkv(gathered[: turn_PF.shape[0]] if padding else gathered)
        qk_PW, v_PW = qkv_PW.split((2 * qkv_PW.shape[1] // 3, qkv_PW.shape[1] // 3), dim=-1)
        q_PHQ, k_PHQ = rotate(qk_PW.unflatten(-1, (2 * self.heads, -1)), turn_PF).split(self.heads, dim=1)
        seen_PW = attend(q_PHQ, k_PHQ, v_PW.unflatten(-1, (self.heads, -1))).flatten(1)
        return row_product(F.pad(seen_PW, (0, 0, 0, padding)) if padding else seen_PW, self.wo, self.ranks)


class VisionEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, shape: VisionShape, ranks: TensorRanks, options: ComputeOptions) -> None:
        super().__init__()
        self.recompute = options.recompute
        self.blocks = nn.ModuleList(VisionBlock(shape, ranks) for _ in range(shape.layers))
        self.final_layernorm = nn.LayerNorm(shape.width, eps=shape.norm_eps)

    def forward(self, x_SW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x_SW = run_layer(self.recompute, block, x_SW, turn_PF, attend)
        out_SW: Tensor = self.final_layernorm(x_SW)
        return out_SW


class VisionTower(nn.Module):
    """From packed patches to groups of patches, one group for each language-model token."""

    def __init__(
        self, shape: VisionShape, ranks: TensorRanks = ALONE, options: ComputeOptions = DEFAULT_OPTIONS
    ) -> None:
        """Hold this rank's heads and inner columns.

        Raises:
            InvalidConfigError: If the ranks do not divide them.
        """
        super().__init__()
        self.shape = shape
        self.ranks = ranks
        self.patch_embed = PatchEmbedding(shape)
        self.encoder = VisionEncoder(shape, ranks, options)

    def forward(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode images.

        Args:
            patches_PC: Patches of all images, each image row-major: bytes of pixels, or normalised floats.
            grids: Rows and columns of each image [patches].

        Returns:
            (M, G, W): merged cells of each image in row-major order, the patches of a cell in row-major order; of
            tensor-parallel ranks each returns its part, the last ones perhaps with cells of padding at the end.

        Raises:
            InvalidConfigError: If grids do not match the patches or the merge.
        """
        shape = self.shape
        lengths = [rows * columns for rows, columns in grids]
        if sum(lengths) != patches_PC.shape[0]:
            raise InvalidConfigError(
                f"grids do not fit the patches: {sum(lengths)} cells, {patches_PC.shape[0]} patches"
            )
        tables, place_S = self._tables(grids)

        def own(table: Tensor) -> Tensor:
            return table if place_S is None else table.index_select(0, place_S)

        patches_SC = patches_PC.index_select(0, own(tables.order_P))
        x_SW = self.patch_embed(patches_SC, own(tables.tap_PB), own(tables.weight_PB))
        turn_PF = patch_turns(tables.row_P, tables.column_P, head_dim=shape.head_dim, theta=shape.rope_theta)
        images = segments(lengths, causal=False, device=x_SW.device, dtype=x_SW.dtype)
        out_SW: Tensor = self.encoder(x_SW, turn_PF, images.attend)
        return out_SW.view(-1, shape.merge**2, shape.width)

    def _own_patches(self, patches: int) -> Tensor | None:
        """Places of this rank's rows; None: all. Padding repeats the last one, which is never read."""
        if self.ranks.row_parts == 1:
            return None
        unit = self.shape.merge**2 * self.ranks.row_parts
        rows = self.ranks.own_rows(-(-patches // unit) * unit)
        return torch.arange(rows.start, rows.stop).clamp_(max=patches - 1)

    def _tables(self, grids: Sequence[Grid]) -> tuple[GridTables, Tensor | None]:
        """Tables of all patches, and the places of this rank's rows, on the device: one copy."""
        tables = packed_tables(grids, merge=self.shape.merge, table_side=self.shape.position_rows)
        place_S = self._own_patches(tables.order_P.shape[0])
        names = [field.name for field in dataclasses.fields(GridTables)]
        held = [*(getattr(tables, name) for name in names), *(() if place_S is None else (place_S,))]
        moved = on_device(held, self.patch_embed.proj.weight.device)
        own = None if place_S is None else moved[-1]
        return GridTables(**dict(zip(names, moved, strict=False))), own


def _gelu(x_SF: Tensor) -> Tensor:
    return F.gelu(x_SF, approximate="tanh")
