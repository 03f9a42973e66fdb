"""Partition of a stream of packed documents over the ranks of a context-parallel group: arithmetic on the host.

``cp = ring x ulysses``. Ranks of a ring pass keys and values around; ranks at one place of the ring exchange heads for
tokens (arXiv:2309.14509), so together they hold one part of the stream and each ends up with some heads of all of it. A
ring's part is two pieces, one from the head and one from the tail of the stream: under a causal mask each rank then has
the same work. Documents may cross every border.

Legend: T tokens of the whole stream, S tokens of one rank.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamCut:
    """A stream of some length, cut over a context-parallel group."""

    tokens: int
    ring: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        """Refuse a length that does not divide.

        Raises:
            InvalidConfigError: Naming the length and its rule.
        """
        pieces = 2 * self.ring if self.ring > 1 else 1
        if self.tokens % pieces or self.tokens // self.ring % self.ulysses:
            raise InvalidConfigError(
                f"tokens do not fit the layout: {self.tokens} tokens of a rank's packs over cp={self.ring}x"
                f"{self.ulysses}, they must be a multiple of {pieces} and of {self.ring * self.ulysses}",
                field="spec.data.sequenceTokens",
            )

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.ring * self.ulysses

    def pieces(self, ring_place: int) -> tuple[range, ...]:
        """Pieces of the stream that a place in the ring holds, in order."""
        if self.ring == 1:
            return (range(self.tokens),)
        length = self.tokens // (2 * self.ring)
        last = 2 * self.ring - 1 - ring_place
        return tuple(range(piece * length, (piece + 1) * length) for piece in (ring_place, last))

    def tokens_of(self, place: int) -> npt.NDArray[np.int64]:
        """Return the tokens of the stream that the rank at this place of the group holds, in its order (S)."""
        ring_place, ulysses_place = divmod(place, self.ulysses)
        part = np.concatenate([np.arange(piece.start, piece.stop) for piece in self.pieces(ring_place)])
        return np.split(part, self.ulysses)[ulysses_place]
