"""A section of the model as a pipeline runs it: a stream of hidden states in, one out; the last one returns its loss.

Legend: T tokens of a microbatch, S rows that a rank holds between layers, N those of them that are not padding, D
decoder width, P patches, C values of a patch, M media tokens, L layers with experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.model.branches import Branches
from polyreme_trainer.model.decoder import Decoded
from polyreme_trainer.model.loss import Weigh
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.patch_grid import Grid
from polyreme_trainer.model.routing import Routing
from polyreme_trainer.model.segment_attention import Attend
from polyreme_trainer.model.vlm import KimiVL


class Microbatch(Protocol):
    """The inputs of a stage: the first one reads tokens and images, the last one targets, all of them positions."""

    @property
    def tokens_T(self) -> Tensor: ...  # noqa: D102
    @property
    def targets_T(self) -> Tensor: ...  # noqa: D102
    @property
    def positions_T(self) -> Tensor: ...  # noqa: D102
    @property
    def document_offsets(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def patches_PC(self) -> Tensor: ...  # noqa: D102
    @property
    def grids(self) -> Sequence[Grid]: ...  # noqa: D102
    @property
    def attend(self) -> Attend | None: ...  # noqa: D102
    @property
    def deliver(self) -> Callable[[Tensor], Tensor] | None: ...  # noqa: D102
    @property
    def real_N(self) -> Tensor | None: ...  # noqa: D102
    @property
    def media_M(self) -> Tensor | None: ...  # noqa: D102
    @property
    def chosen_LSX(self) -> Tensor | None: ...  # noqa: D102
    @property
    def learned_N(self) -> Tensor | None: ...  # noqa: D102
    @property
    def branches(self) -> Branches | None: ...  # noqa: D102


def decode(model: KimiVL, stream_SD: Tensor | None, microbatch: Microbatch) -> Decoded:
    """Run a microbatch through a model's layers; without a stream, starting from its tokens and images."""
    decoded: Decoded = model(
        microbatch.tokens_T,
        microbatch.positions_T,
        microbatch.document_offsets,
        microbatch.patches_PC,
        microbatch.grids,
        stream_SD=stream_SD,
        attend=microbatch.attend,
        deliver=microbatch.deliver,
        real_N=microbatch.real_N,
        media_M=microbatch.media_M,
        chosen_LSX=microbatch.chosen_LSX,
    )
    return decoded


class Stage(nn.Module):
    """Runs its section and sums up the routing of tokens.

    Its parameters are named after ``model``: names of the whole model, which never change with the split.
    """

    def __init__(self, model: KimiVL) -> None:
        super().__init__()
        self.model = model
        self.weigh: Callable[[Branches | None], Weigh] | None = None
        """How the objective weighs the tokens of a microbatch, by its branches; None: each counts one."""
        self.temperature = 1.0
        """What the objective divides logits by."""
        self._routing: Routing | None = None
        self.layers_with_experts = tuple(
            index
            for index in model.section.layers
            if isinstance(model.get_submodule(f"language_model.model.layers.{index}.mlp"), MixtureOfExperts)
        )

    def forward(self, stream_SD: Tensor | None = None, *, microbatch: Microbatch) -> Tensor:
        """Run one microbatch.

        Args:
            stream_SD: Output of the stage before; None on the first stage.
            microbatch: Its tokens, images and targets.

        Returns:
            The stream (S, D); on the last stage the sum of the loss over what is counted (scalar).

        Raises:
            InvalidConfigError: If offsets, grids or media tokens do not fit.
        """
        decoded = decode(self.model, stream_SD, microbatch)
        self._routing = decoded.routing if self._routing is None else self._routing + decoded.routing
        if not self.model.section.last:
            stream: Tensor = decoded.hidden_TD
            return stream
        weigh = None if self.weigh is None else self.weigh(microbatch.branches)
        loss_sum: Tensor = self.model.language_model.lm_head(
            self.heated(decoded.hidden_TD),
            microbatch.targets_T,
            microbatch.learned_N,
            weigh=weigh,
        )
        return loss_sum

    def heated(self, hidden_SD: Tensor) -> Tensor:
        """Return what the head takes, so that its logits are divided by the temperature."""
        return hidden_SD if self.temperature == 1 else hidden_SD / self.temperature

    def rows(self, tokens: int) -> int:
        """Rows that this rank holds between layers, of a microbatch with so many tokens."""
        return len(range(*self.model.ranks.own_rows(tokens).indices(tokens)))

    def take_routing(self) -> Routing:
        """Return the routing since the last call, by the layers with experts that are held.

        Raises:
            InvalidConfigError: If nothing ran since.
        """
        if self._routing is None:
            raise InvalidConfigError(
                "no microbatch ran: a stage has no routing statistics before its first forward pass"
            )
        routing, self._routing = self._routing, None
        return routing
