"""The tokenizer: byte-level BPE, trained on the datasets' own text or released with weights.

A trained one has digits as tokens of their own and special tokens first. Special tokens never come from text:
``<|media|>`` written in a conversation is encoded as its characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.chat_format import (
    END,
    MEDIA,
    OWN_TEMPLATE,
    PAD,
    ROLES,
    ChatFormat,
    ChatTemplate,
    format_of_template,
)
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.tokenizer_file import split_template

SPECIALS = (PAD, END, MEDIA, *(getattr(OWN_TEMPLATE, role).before for role in ROLES))
OPERATION, VERSION = "train-tokenizer", 1
PHRASES_VOCABULARY_MAX = 4096
"""Up to this vocabulary merges cross spaces, so that a recurring question is one token; above, words are the bound."""
WORDS = r"[^\s\p{N}]+|\p{N}|\s+"
TOKEN_CHARACTERS_MAX = 64
REMEMBERED_MAX, REMEMBERED_CHARACTERS_MAX = 16_384, 256
"""Texts whose tokens one process remembers, such as a question that recurs, and the longest of them."""


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
    """A tokenizer with the format of its conversations.

    Args:
        stored: As ``tokenizer_file`` stores it.

    Raises:
        IndexDamagedError: If a trained one lacks a special token.
        InvalidConfigError: If the template of a released one does not fit it.
    """

    def __init__(self, stored: bytes) -> None:
        data, template = split_template(stored)
        self._tokenizer = Tokenizer.from_str(data.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.format = self._own_format() if template is None else self._format_of(ChatTemplate.model_validate(template))
        # From here on: what looks like a special token in a text is text.
        self._tokenizer.encode_special_tokens = True
        self._known: dict[str, tuple[int, ...]] = {}

    @property
    def size(self) -> int:
        """Tokens in the vocabulary."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def ids_end(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text; the newest short texts are remembered."""
        found = self._known.get(text)
        if found is None:
            found = self._ids(text)
            if len(text) <= REMEMBERED_CHARACTERS_MAX:
                if len(self._known) >= REMEMBERED_MAX:
                    self._known.clear()
                self._known[text] = found
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _own_format(self) -> ChatFormat:
        try:
            return self._format_of(OWN_TEMPLATE)
        except InvalidConfigError as error:
            raise IndexDamagedError(f"tokenizer lacks a special token: {error.message}") from error

    def _format_of(self, template: ChatTemplate) -> ChatFormat:
        added = self._tokenizer.get_added_tokens_decoder()
        specials = {str(token.content): int(number) for number, token in added.items() if token.special}
        return format_of_template(template, encode=lambda text: list(self._ids(text)), specials=specials)
