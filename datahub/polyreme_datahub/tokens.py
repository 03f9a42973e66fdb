"""The tokenizer: byte-level BPE trained on the datasets' own text, digits as tokens of their own, special tokens first.

Special tokens never come from text: ``<|media|>`` written in a conversation is encoded as its characters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer

from polyreme_datahub.errors import IndexDamagedError

PAD, END, MEDIA = "<|pad|>", "<|end|>", "<|media|>"
ROLE_TOKENS: Mapping[str, str] = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = (PAD, END, MEDIA, *ROLE_TOKENS.values())
OPERATION, VERSION = "train-tokenizer", 1
PHRASES_VOCABULARY_MAX = 4096
"""Up to this vocabulary merges cross spaces, so that a recurring question is one token; above, words are the bound."""
WORDS = r"[^\s\p{N}]+|\p{N}|\s+"
TOKEN_CHARACTERS_MAX = 64
REMEMBERED_MAX, REMEMBERED_CHARACTERS_MAX = 16_384, 256
"""Texts whose tokens one process remembers, such as a question that recurs, and the longest of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Ids of the special tokens."""

    pad: int
    end: int
    media: int
    roles: Mapping[str, int]


def train_tokenizer(counts: Mapping[str, int], *, vocabulary: int) -> bytes:
    """Train on texts with their counts; the same texts give the same bytes.

    Args:
        counts: How often each text occurs.
        vocabulary: Most tokens, special tokens and the 256 bytes included.
    """
    tokenizer = Tokenizer(BPE())
    steps: list[PreTokenizer] = [Digits(individual_digits=True)]
    if vocabulary > PHRASES_VOCABULARY_MAX:
        steps = [Split(Regex(WORDS), "isolated")]
    tokenizer.pre_tokenizer = PreTokenizers([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        max_token_length=TOKEN_CHARACTERS_MAX,
        show_progress=False,
    )
    texts = [text for text, count in sorted(counts.items()) for _ in range(count)]
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str()).encode()


class TextTokenizer:
    """A trained tokenizer."""

    def __init__(self, data: bytes) -> None:
        self._tokenizer = Tokenizer.from_str(data.decode())
        self._tokenizer.encode_special_tokens = True
        self._known: dict[str, tuple[int, ...]] = {}

        def number(token: str) -> int:
            found = self._tokenizer.token_to_id(token)
            if found is None:
                raise IndexDamagedError(f"tokenizer lacks a special token: {token}")
            return found

        self.ids = SpecialIds(
            pad=number(PAD),
            end=number(END),
            media=number(MEDIA),
            roles={role: number(token) for role, token in ROLE_TOKENS.items()},
        )

    @property
    def size(self) -> int:
        """Tokens in the vocabulary."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text; the newest short texts are remembered."""
        found = self._known.get(text)
        if found is None:
            found = tuple(self._tokenizer.encode(text).ids)
            if len(text) <= REMEMBERED_CHARACTERS_MAX:
                if len(self._known) >= REMEMBERED_MAX:
                    self._known.clear()
                self._known[text] = found
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
