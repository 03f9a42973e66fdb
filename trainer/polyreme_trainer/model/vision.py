"""MoonViT (Kimi-VL, arXiv:2504.07491, section 2.1): a vision transformer over packed patches at native resolution.

Learned positions are interpolated (bicubic) to each image's grid, and queries and keys are turned by row and column.
Attention is full within an image and never crosses images. Parameter names are those of the Kimi-VL checkpoints.

Legend: P patches of all images, C values of one patch (channel, row, column), W tower width, H heads, Q head width,
M merged tokens, G patches of a merged token, B taps, F rotary pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_api.plan.shapes import VisionShape
from polyreme_trainer.model.attend import Attend, segments
from polyreme_trainer.model.grid import Grid, GridTables, packed_tables
from polyreme_trainer.model.rotary import patch_turns, rotate


class PositionTable(nn.Module):
    """Learned absolute positions, read between their cells."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.position_rows, shape.position_rows, shape.width))

    def forward(self, tap_PB: Tensor, weight_PB: Tensor) -> Tensor:
        """Sum the weighted cells around each patch."""
        table = self.weight.flatten(0, 1)
        weight_PB = weight_PB.to(table.dtype)
        out_PW: Tensor = F.embedding_bag(tap_PB, table, per_sample_weights=weight_PB, mode="sum")
        return out_PW


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, so one product of flattened patches, plus positions."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(shape.channels, shape.width, kernel_size=shape.patch_px, stride=shape.patch_px)
        self.pos_emb = PositionTable(shape)

    def forward(self, patches_PC: Tensor, tap_PB: Tensor, weight_PB: Tensor) -> Tensor:
        """Embed patches (float pixels, channel-major)."""
        embedded_PW = F.linear(patches_PC, self.proj.weight.flatten(1), self.proj.bias)
        position_PW: Tensor = self.pos_emb(tap_PB, weight_PB)
        return embedded_PW + position_PW


class VisionFeedForward(nn.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.fc0 = nn.Linear(shape.width, shape.ffn_width)
        self.fc1 = nn.Linear(shape.ffn_width, shape.width)

    def forward(self, x_PW: Tensor) -> Tensor:
        """Apply to each row."""
        out_PW: Tensor = self.fc1(F.gelu(self.fc0(x_PW), approximate="tanh"))
        return out_PW


class VisionBlock(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm0 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.wqkv = nn.Linear(shape.width, 3 * shape.width)
        self.wo = nn.Linear(shape.width, shape.width)
        self.mlp = VisionFeedForward(shape)

    def forward(self, x_PW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        """Return the stream after this block."""
        x_PW = x_PW + self._attention(self.norm0(x_PW), turn_PF, attend)
        out_PW: Tensor = x_PW + self.mlp(self.norm1(x_PW))
        return out_PW

    def _attention(self, x_PW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        qk_PW, v_PW = self.wqkv(x_PW).split((2 * x_PW.shape[1], x_PW.shape[1]), dim=-1)
        q_PHQ, k_PHQ = rotate(qk_PW.unflatten(-1, (2 * self.heads, -1)), turn_PF).split(self.heads, dim=1)
        out_PW: Tensor = self.wo(attend(q_PHQ, k_PHQ, v_PW.unflatten(-1, (self.heads, -1))).flatten(1))
        return out_PW


class VisionEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))
        self.final_layernorm = nn.LayerNorm(shape.width, eps=shape.norm_eps)

    def forward(self, x_PW: Tensor, turn_PF: Tensor, attend: Attend) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x_PW = block(x_PW, turn_PF, attend)
        out_PW: Tensor = self.final_layernorm(x_PW)
        return out_PW


class VisionTower(nn.Module):
    """From packed patches to groups of patches, one group for each language-model token."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.encoder = VisionEncoder(shape)

    def forward(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode images.

        Args:
            patches_PC: Normalised patches of all images, each image row-major.
            grids: Rows and columns of each image [patches].

        Returns:
            (M, G, W): merged cells of each image in row-major order, the patches of a cell in row-major order.

        Raises:
            InvalidConfigError: If grids do not match the patches or the merge.
        """
        shape, weight = self.shape, self.patch_embed.proj.weight
        lengths = [rows * columns for rows, columns in grids]
        if sum(lengths) != patches_PC.shape[0]:
            raise InvalidConfigError(
                f"grids do not fit the patches: {sum(lengths)} cells, {patches_PC.shape[0]} patches"
            )
        tables = self._tables(grids)
        patches_PC = patches_PC.to(weight.dtype).index_select(0, tables.order_P)
        x_PW = self.patch_embed(patches_PC, tables.tap_PB, tables.weight_PB)
        turn_PF = patch_turns(tables.row_P, tables.column_P, head_dim=shape.head_dim, theta=shape.rope_theta)
        images = segments(lengths, causal=False, device=x_PW.device, dtype=x_PW.dtype)
        out_PW: Tensor = self.encoder(x_PW, turn_PF, images.attend)
        return out_PW.view(-1, shape.merge**2, shape.width)

    def _tables(self, grids: Sequence[Grid]) -> GridTables:
        device = self.patch_embed.proj.weight.device
        tables = packed_tables(grids, merge=self.shape.merge, table_side=self.shape.position_rows)
        if device.type == "cpu":
            return tables
        names = ("order_P", "row_P", "column_P", "tap_PB", "weight_PB")
        return GridTables(**{name: getattr(tables, name).to(device, non_blocking=True) for name in names})
