"""The whole vision-language model on one flat stream of packed documents.

Legend: T tokens of all packs of this rank, D decoder width, V vocabulary, P patches, C values of a patch,
M image tokens, S rows of this rank between layers, L layers with experts, X experts of a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.adapters import Adapters
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.decoder import Decoded, LanguageModel, LayerAttend
from polyreme_trainer.model.moe import Dispatcher
from polyreme_trainer.model.patch_grid import Grid
from polyreme_trainer.model.projector import Projector
from polyreme_trainer.model.section import Section, whole
from polyreme_trainer.model.segment_attention import Attend, segments
from polyreme_trainer.model.tensor import ALONE, TensorRanks
from polyreme_trainer.model.vision import VisionTower


class KimiVL(nn.Module):
    """Tower, projector and decoder, or a section of them, under the names of the Kimi-VL checkpoints (experts stacked).

    Parts outside the section do not exist: only the first section has ``image_features`` and ``embed``, only the last
    one ``logits``.
    """

    vision_tower: VisionTower
    multi_modal_projector: Projector

    def __init__(
        self,
        shape: ModelShape,
        *,
        media_token: int,
        section: Section | None = None,
        experts_local: range | None = None,
        dispatcher: Dispatcher | None = None,
        ranks: TensorRanks = ALONE,
        options: ComputeOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Build with unset parameters; ``initialise`` or a checkpoint fills them.

        Args:
            shape: Sizes.
            media_token: Token id whose embedding an image feature replaces.
            section: Part of the model that is held, all by default.
            experts_local: Experts that this rank holds, all by default.
            dispatcher: Reaches the experts of other ranks.
            ranks: Tensor-parallel ranks that share the layers.
            options: What layers recompute, and which rows they drop.

        Raises:
            InvalidConfigError: If ``experts_local`` or ``ranks`` do not fit the shape.
        """
        super().__init__()
        self.computes_in: torch.dtype | None = None
        """Type of the computation, if parameters are held in another."""
        self.adapters: Adapters | None = None
        """Adapters that were added (``adapters.adapt``): only they learn."""
        self.shape = shape
        self.media_token = media_token
        self.experts_local = range(shape.decoder.experts) if experts_local is None else experts_local
        self.section = section or whole(shape)
        self.ranks = ranks
        if self.section.first and shape.sees:
            self.vision_tower = VisionTower(shape.vision, ranks, options)
            self.multi_modal_projector = Projector(shape, ranks)
        self.language_model = LanguageModel(
            shape.decoder,
            self.section,
            experts_local=experts_local,
            dispatcher=dispatcher,
            ranks=ranks,
            options=options,
        )

    @property
    def like(self) -> Tensor:
        """An empty tensor, of the type and on the device of the computation."""
        parameter = next(self.parameters())
        return torch.empty(0, dtype=self.computes_in or parameter.dtype, device=parameter.device)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        document_offsets: Sequence[int],
        patches_PC: Tensor,
        grids: Sequence[Grid],
        *,
        stream_SD: Tensor | None = None,
        attend: Attend | None = None,
        deliver: Callable[[Tensor], Tensor] | None = None,
        real_N: Tensor | None = None,
        media_M: Tensor | None = None,
        chosen_LSX: Tensor | None = None,
    ) -> Decoded:
        """Run packed documents through the section.

        Args:
            tokens_T: int64 token ids.
            positions_T: int64 positions within each document.
            document_offsets: Host integers from 0 to T; attention never crosses one. ``attend`` replaces them.
            patches_PC: Patches of all images, in the order of their media tokens: bytes of pixels, or normalised
                floats.
            grids: Host integers, rows and columns of each image [patches].
            stream_SD: Output of the section before; patches and grids are then not used.
            attend: Attention to the stream that contains these tokens.
            deliver: Turns features of the images given into those of the media tokens held, if these differ.
            real_N: Which of the rows that this rank holds between layers are not padding; None: all.
            media_M: Which of them are media tokens (``embed``).
            chosen_LSX: Experts that these rows go to (``Decoder.forward``).

        Raises:
            InvalidConfigError: If offsets, grids or media tokens do not fit.
        """
        if stream_SD is None:
            stream_SD = self.begin(tokens_T, patches_PC, grids, deliver, media_M)
        if attend is not None:
            return self.decode(stream_SD, positions_T, lambda _: attend, real_N, chosen_LSX)
        lengths = document_lengths(document_offsets, tokens_T.shape[0])
        documents = segments(lengths, causal=True, device=stream_SD.device, dtype=stream_SD.dtype)
        return self.decode(stream_SD, positions_T, lambda _: documents.attend, real_N, chosen_LSX)

    def begin(
        self,
        tokens_T: Tensor,
        patches_PC: Tensor,
        grids: Sequence[Grid],
        deliver: Callable[[Tensor], Tensor] | None = None,
        media_M: Tensor | None = None,
    ) -> Tensor:
        """Make the stream (S, D) that the first layer takes: embedded tokens, with features of images in place."""
        features_MD = self.image_features(patches_PC, grids)
        stream_SD = self.embed(tokens_T, features_MD if deliver is None else deliver(features_MD), media_M)
        if self.adapters is not None and not self.section.last and torch.is_grad_enabled():
            # A pipeline sends a gradient back to every stage, also to a first one without adapters.
            stream_SD.requires_grad_()
        return stream_SD

    def image_features(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode and project images, one row for each media token; no images give no rows and zero gradients.

        Raises:
            InvalidConfigError: If there are images and the model has no tower.
        """
        if not self.shape.sees:
            if grids:
                raise InvalidConfigError(
                    f"model {self.shape.name} takes no images: {len(grids)} in this batch, expected none",
                    field="spec.data.sources[].dataset or spec.model.preset",
                )
            return patches_PC.new_zeros((0, self.shape.decoder.width))
        features_MD: Tensor = self.multi_modal_projector(self.vision_tower(patches_PC, grids))
        return features_MD

    def embed(self, tokens_T: Tensor, features_MD: Tensor, media_M: Tensor | None = None) -> Tensor:
        """Embed tokens and put image features in place of media tokens.

        Args:
            tokens_T: Tokens of this rank.
            features_MD: Features of the media tokens among the rows that this rank holds between layers.
            media_M: Places of these tokens among the rows, rising; None: they are looked up, and the host waits for it.

        Returns:
            Those rows (S, D).

        Raises:
            InvalidConfigError: If there are not as many media tokens as features.
        """
        embedded_SD: Tensor = self.language_model.model.embed(tokens_T)
        if media_M is None:
            tokens_S = tokens_T[self.ranks.own_rows(tokens_T.shape[0])]
            media_M = (tokens_S == self.media_token).nonzero().squeeze(1)
        if media_M.shape[0] != features_MD.shape[0]:
            raise InvalidConfigError(
                f"media tokens do not fit the images: {media_M.shape[0]} tokens, {features_MD.shape[0]} features"
            )
        return embedded_SD.index_copy(0, media_M, features_MD.to(embedded_SD.dtype))

    def decode(
        self,
        embedded_SD: Tensor,
        positions_T: Tensor,
        attend: LayerAttend,
        real_N: Tensor | None = None,
        chosen_LSX: Tensor | None = None,
    ) -> Decoded:
        """Run the section's layers on embedded tokens, with the caller's attention."""
        decoded: Decoded = self.language_model.model(embedded_SD, positions_T, attend, real_N, chosen_LSX)
        return decoded

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Score the vocabulary after each hidden state (T, V); without gradient where ranks share it."""
        logits_TV: Tensor = self.language_model.lm_head(hidden_TD)
        if self.ranks.parts == 1:
            return logits_TV
        words = logits_TV.shape[1]
        return self.ranks.total(
            F.pad(logits_TV, (self.ranks.place * words, (self.ranks.parts - 1 - self.ranks.place) * words))
        )


def document_lengths(document_offsets: Sequence[int], tokens: int) -> list[int]:
    """Turn offsets into lengths.

    Raises:
        InvalidConfigError: If offsets do not rise from 0 to ``tokens``.
    """
    offsets = [int(offset) for offset in document_offsets]
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or min(lengths, default=0) < 0:
        raise InvalidConfigError(f"document offsets do not fit: {offsets[:8]}, they must rise from 0 to {tokens}")
    return lengths
