"""The whole vision-language model on one flat stream of packed documents.

Legend: T tokens of all packs of this rank, D decoder width, V vocabulary, P patches, C values of a patch,
M image tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_api.plan.shapes import ModelShape
from polyreme_trainer.model.attend import segments
from polyreme_trainer.model.decoder import Decoded, LanguageModel, LayerAttend
from polyreme_trainer.model.grid import Grid
from polyreme_trainer.model.moe import Dispatcher
from polyreme_trainer.model.projector import Projector
from polyreme_trainer.model.section import Section, whole
from polyreme_trainer.model.vision import VisionTower


class KimiVL(nn.Module):
    """Tower, projector and decoder, or a section of them, under the names of the Kimi-VL checkpoints (experts stacked).

    What the section does not hold is not there: ``image_features`` and ``embed`` are the first section's, ``logits``
    the last one's.
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
    ) -> None:
        """Build with unset parameters; ``initialise`` or a checkpoint fills them.

        Args:
            shape: Sizes.
            media_token: Token id whose embedding an image feature replaces.
            section: What of the model is held, all by default.
            experts_local: Experts that this rank holds, all by default.
            dispatcher: Reaches the experts of other ranks.

        Raises:
            InvalidConfigError: If ``experts_local`` does not fit the shape.
        """
        super().__init__()
        self.shape = shape
        self.media_token = media_token
        self.experts_local = range(shape.decoder.experts) if experts_local is None else experts_local
        self.section = section or whole(shape)
        if self.section.first:
            self.vision_tower = VisionTower(shape.vision)
            self.multi_modal_projector = Projector(shape)
        self.language_model = LanguageModel(
            shape.decoder, self.section, experts_local=experts_local, dispatcher=dispatcher
        )

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        document_offsets: Sequence[int],
        patches_PC: Tensor,
        grids: Sequence[Grid],
        *,
        stream_TD: Tensor | None = None,
        balance: bool = False,
    ) -> Decoded:
        """Run packed documents through the section.

        Args:
            tokens_T: int64 token ids.
            positions_T: int64 positions within each document.
            document_offsets: Host integers from 0 to T; attention never crosses one.
            patches_PC: Float patches of all images, in the order of their media tokens.
            grids: Host integers, rows and columns of each image [patches].
            stream_TD: What the section before made of the tokens; patches and grids are then not looked at.
            balance: Whether to compute the balance loss.

        Raises:
            InvalidConfigError: If offsets, grids or media tokens do not fit.
        """
        if stream_TD is None:
            stream_TD = self.embed(tokens_T, self.image_features(patches_PC, grids))
        lengths = document_lengths(document_offsets, tokens_T.shape[0])
        documents = segments(lengths, causal=True, device=stream_TD.device, dtype=stream_TD.dtype)
        return self.decode(
            stream_TD, positions_T, lambda _: documents.attend, _document_of(lengths, tokens_T) if balance else None
        )

    def image_features(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode and project images, one row for each media token; no images give no rows and zero gradients."""
        features_MD: Tensor = self.multi_modal_projector(self.vision_tower(patches_PC, grids))
        return features_MD

    def embed(self, tokens_T: Tensor, features_MD: Tensor) -> Tensor:
        """Embed tokens and put image features in place of media tokens; one wait for the device.

        Raises:
            InvalidConfigError: If there are not as many media tokens as features.
        """
        embedded_TD: Tensor = self.language_model.model.embed_tokens(tokens_T)
        places_M = (tokens_T == self.media_token).nonzero().squeeze(1)
        if places_M.shape[0] != features_MD.shape[0]:
            raise InvalidConfigError(
                f"media tokens do not fit the images: {places_M.shape[0]} tokens, {features_MD.shape[0]} features"
            )
        return embedded_TD.index_copy(0, places_M, features_MD.to(embedded_TD.dtype))

    def decode(
        self, embedded_TD: Tensor, positions_T: Tensor, attend: LayerAttend, document_T: Tensor | None = None
    ) -> Decoded:
        """Run the section's layers on embedded tokens, with the attention that the caller wants."""
        decoded: Decoded = self.language_model.model(embedded_TD, positions_T, attend, document_T)
        return decoded

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Score the vocabulary after each hidden state (T, V)."""
        logits_TV: Tensor = self.language_model.lm_head(hidden_TD)
        return logits_TV


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


def _document_of(lengths: Sequence[int], tokens_T: Tensor) -> Tensor:
    kept = torch.tensor([length for length in lengths if length], device=tokens_T.device)
    return torch.repeat_interleave(torch.arange(len(kept), device=tokens_T.device), kept)
