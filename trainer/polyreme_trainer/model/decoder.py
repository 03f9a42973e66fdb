"""The decoder: embedding, layers of latent attention and (dense or expert) feed-forward, final norm, head.

A pipeline stage holds a section of it, under the names of the whole model: layers are numbered through the model.

Legend: T tokens, S those of this rank between layers (all without tensor parallelism), D model width, V vocabulary, F
rotary pairs, L layers with experts, X experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.attention import LatentAttend, LatentAttention, RMSNorm
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.loss import Weigh, token_loss, token_scores
from polyreme_trainer.model.moe import Dispatcher, FeedForward, MixtureOfExperts, Routed
from polyreme_trainer.model.recompute import recomputable, run_layer
from polyreme_trainer.model.rotary import decoder_turns
from polyreme_trainer.model.routing import Routing
from polyreme_trainer.model.section import Section
from polyreme_trainer.model.segment_attention import Attend
from polyreme_trainer.model.tensor import ALONE, TensorRanks, share

LayerAttend = Callable[[int], Attend | LatentAttend]
"""Attention of layer ``index``: the packed one for all layers, or a cache that differs by layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Hidden states after the last layer held (after the final norm, if it is held), and the routing of tokens."""

    hidden_TD: Tensor
    routing: Routing
    """Of this rank's tokens, by each MoE layer held."""
    experts: tuple[Tensor, ...]
    """The experts of each token (T, X), by the same layers."""


class DecoderLayer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the stream."""

    def __init__(
        self,
        shape: DecoderShape,
        index: int,
        *,
        experts_local: range | None = None,
        dispatcher: Dispatcher | None = None,
        ranks: TensorRanks = ALONE,
        options: ComputeOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__()
        self.self_attn = LatentAttention(shape, ranks)
        self.mlp: FeedForward | MixtureOfExperts
        if index < shape.dense_layers:
            self.mlp = FeedForward(shape.width, shape.dense_ffn_width, ranks)
        else:
            self.mlp = MixtureOfExperts(
                shape, experts_local=experts_local, dispatcher=dispatcher, ranks=ranks, options=options
            )
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)

    def forward(
        self,
        x_SD: Tensor,
        turn_TF: Tensor,
        attend: Attend | LatentAttend,
        real_N: Tensor | None = None,
        chosen_SX: Tensor | None = None,
    ) -> tuple[Tensor, Routed | None]:
        """Return the stream after this layer, and its routing if it has experts."""
        x_SD = x_SD + self.self_attn(recomputable(self.input_layernorm, x_SD), turn_TF, attend)
        normed_SD = recomputable(self.post_attention_layernorm, x_SD)
        if isinstance(self.mlp, FeedForward):
            return x_SD + self.mlp(normed_SD), None
        out_SD, routed = self.mlp(normed_SD, real_N, chosen_SX)
        return x_SD + out_SD, routed


class Decoder(nn.Module):
    """Embedding, layers and final norm, as far as the section holds them."""

    embed_tokens: nn.Embedding
    norm: RMSNorm

    def __init__(
        self,
        shape: DecoderShape,
        section: Section,
        *,
        experts_local: range | None = None,
        dispatcher: Dispatcher | None = None,
        ranks: TensorRanks = ALONE,
        options: ComputeOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.rope_theta = shape.rope_theta
        """Base of the rotary positions: a curriculum stage may have another than the shape."""
        self.section = section
        self.ranks = ranks
        self.recompute = options.recompute
        self.before_layer: Callable[[int, Tensor], Tensor] | None = None
        """Called with the number of each layer and its input, which it returns; it may watch the gradient of it."""
        if section.first:
            words = share(shape.vocabulary, ranks, what="the vocabulary")
            # A weight of our own skips the default initialisation, whose meta kernel imports the compiler (2 to 8 s).
            self.embed_tokens = nn.Embedding(words, shape.width, _weight=torch.empty(words, shape.width))
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(
                    shape, index, experts_local=experts_local, dispatcher=dispatcher, ranks=ranks, options=options
                )
                for index in section.layers
            }
        )
        if section.last:
            self.norm = RMSNorm(shape.width, shape.norm_eps)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embed tokens: the rows of this rank (S, D). Tensor-parallel ranks share the vocabulary."""
        if self.ranks.parts == 1:
            embedded_TD: Tensor = self.embed_tokens(tokens_T)
            return embedded_TD
        words = self.embed_tokens.num_embeddings
        own_T = tokens_T - self.ranks.place * words
        held_T = (own_T >= 0) & (own_T < words)
        return self.ranks.scatter(self.embed_tokens(own_T.clamp(0, words - 1)) * held_T.unsqueeze(1))

    def forward(
        self,
        x_SD: Tensor,
        positions_T: Tensor,
        attend: LayerAttend,
        real_N: Tensor | None = None,
        chosen_LSX: Tensor | None = None,
    ) -> Decoded:
        """Run the section's layers.

        Args:
            x_SD: Embedded tokens, image features in place; or the output of the stage before.
            positions_T: Position of each token within its document, int64.
            attend: Attention of each layer.
            real_N: Which of this rank's rows are not padding; None: all.
            chosen_LSX: Experts that the rows go to, by each layer with experts of the model; None: routers choose.
        """
        turn_TF = decoder_turns(positions_T, self.shape, theta=self.rope_theta)
        routings: list[Routed] = []
        for index, layer in self.layers.items():
            if self.before_layer is not None:
                x_SD = self.before_layer(int(index), x_SD)
            number = int(index) - self.shape.dense_layers
            chosen_SX = None if chosen_LSX is None or number < 0 else chosen_LSX[number]
            x_SD, routed = run_layer(self.recompute, layer, x_SD, turn_TF, attend(int(index)), real_N, chosen_SX)
            if routed is not None:
                routings.append(routed)
        return Decoded(
            hidden_TD=self.norm(x_SD) if self.section.last else x_SD,
            routing=Routing.of(routings, experts=self.shape.experts, device=x_SD.device),
            experts=tuple(routed.experts_TK for routed in routings),
        )


class Head(nn.Linear):
    """Scores words. The loss is computed here too: FSDP gathers a sharded weight when its module is called."""

    def __init__(self, shape: DecoderShape, ranks: TensorRanks) -> None:
        super().__init__(shape.width, share(shape.vocabulary, ranks, what="the vocabulary"), bias=False)
        self.ranks = ranks

    def forward(
        self,
        hidden_SD: Tensor,
        targets_T: Tensor | None = None,
        learned_N: Tensor | None = None,
        *,
        weigh: Weigh | None = None,
        scores: bool = False,
    ) -> Tensor:
        """Score this rank's words after each hidden state.

        With targets, return their loss (``token_loss``) or, without gradient, their scores (``token_scores``).
        """
        if targets_T is None:
            return super().forward(hidden_SD)
        if scores:
            return token_scores(hidden_SD, self.weight, targets_T, self.ranks, learned_N=learned_N)
        loss_sum, _ = token_loss(hidden_SD, self.weight, targets_T, self.ranks, learned_N=learned_N, weigh=weigh)
        return loss_sum


class LanguageModel(nn.Module):
    """Decoder and, on the last stage, untied output head."""

    lm_head: Head

    def __init__(
        self,
        shape: DecoderShape,
        section: Section,
        *,
        experts_local: range | None = None,
        dispatcher: Dispatcher | None = None,
        ranks: TensorRanks = ALONE,
        options: ComputeOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__()
        self.model = Decoder(
            shape, section, experts_local=experts_local, dispatcher=dispatcher, ranks=ranks, options=options
        )
        if section.last:
            self.lm_head = Head(shape, ranks)
