"""The tokenizer: byte-level BPE, trained on the datasets' own text or released with weights; how it encodes turns.

A trained one has digits as tokens of their own and special tokens first. Special tokens never come from text:
``<|media|>`` written in a conversation is encoded as its characters.

The form of a turn is the tokenizer's (``chat_format``): of a trained one a role token, the text, and ``<|end|>`` after
each answer. An image takes one media token for each merged cell. Only answers, each with the token that ends it, are
learned; tokens of images never are.

A preference is one text, too: its prompt, the chosen answer, the prompt's last token once more, the rejected answer.
Only the two answers are learned, each with its end; the repeated token is there to have the second one follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.chat_format import (
    END,
    IMAGE_MARK,
    MEDIA,
    OWN_TEMPLATE,
    PAD,
    ROLES,
    ChatFormat,
    ChatTemplate,
    format_of_template,
)
from polyreme_datahub.errors import BadRecordError, IndexDamagedError
from polyreme_datahub.tokenizer_file import split_template

SPECIALS = (PAD, END, MEDIA, *(getattr(OWN_TEMPLATE, role).before for role in ROLES))
OPERATION, VERSION = "train-tokenizer", 1
TOKENS_MAX = 1_048_576
"""Most tokens of a conversation."""
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


_OPEN: dict[str, TextTokenizer] = {}


def open_tokenizer(digest: str, data: bytes) -> TextTokenizer:
    """Open the tokenizer whose file has this digest; the newest one is kept."""
    opened = _OPEN.get(digest)
    if opened is None:
        opened = TextTokenizer(data)
        _OPEN.clear()
        _OPEN[digest] = opened
    return opened


def encode_preference(
    tokenizer: TextTokenizer, turns: Sequence[Mapping[str, str]], rejected: str, cells: Sequence[int]
) -> dict[str, Any]:
    """Encode a prompt with two answers; the last turn is the chosen one. Returns as ``encode_conversation``.

    Raises:
        BadRecordError: As there, or if the prompt ends with an image's token, which can't be repeated.
    """
    encoded = encode_conversation(tokenizer, turns, cells)
    prompt, end = encoded["prompt"], encoded["learned"][-1][1]
    tokens = encoded["tokens"][:end]
    if not prompt or tokens[prompt - 1] == tokenizer.format.media:
        raise BadRecordError(
            "preference: an image ends the prompt; write text after it, or name what begins an answer in the template "
            "(assistant.before)",
            rule="preference",
        )
    tokens += [tokens[prompt - 1], *tokenizer.encode(rejected), tokenizer.format.end]
    _check_count(tokens)
    return {**encoded, "tokens": tokens, "learned": [[prompt, end], [end + 1, len(tokens)]]}


def encode_conversation(
    tokenizer: TextTokenizer, turns: Sequence[Mapping[str, str]], cells: Sequence[int]
) -> dict[str, Any]:
    """Encode turns, with ``cells[i]`` media tokens for image ``i``.

    Returns:
        ``tokens``; ``learned``, half-open ranges of tokens that are targets; ``images``, those of each image;
        ``prompt``, the tokens before the last answer; ``question`` and ``expected``, its texts.

    Raises:
        BadRecordError: If there is no answer, or more tokens than any pack holds.
    """
    form = tokenizer.format
    marked = any(IMAGE_MARK in turn["content"] for turn in turns)
    first_user = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), 0)
    tokens = [*form.opening, *(form.default_system if turns[0]["role"] != "system" else ())]
    learned: list[list[int]] = []
    images: list[list[int]] = []
    waiting = list(cells)
    prompt, asked, question, expected = 0, "", "", ""
    for at, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        tokens += form.before[role]
        start = len(tokens)
        if not marked and at == first_user:
            while waiting:
                images.append(_add_image(tokens, form, waiting.pop(0)))
        for number, text in enumerate(content.split(IMAGE_MARK)):
            if number:
                images.append(_add_image(tokens, form, waiting.pop(0)))
            begins = len(tokens)
            tokens += tokenizer.encode(text) if text else ()
            if role == "assistant":
                _learn(learned, begins, len(tokens))
        tokens += form.after[role]
        if role == "assistant":
            ends = len(tokens) - len(form.after[role])
            _learn(learned, ends, ends + 1)
            prompt, question, expected = start, asked, content
        elif role == "user":
            asked = content.replace(IMAGE_MARK, "").strip()
    if not learned:
        raise BadRecordError("conversation without an answer", rule="conversations")
    _check_count(tokens)
    return {
        "tokens": tokens,
        "learned": learned,
        "images": images,
        "prompt": prompt,
        "question": question,
        "expected": expected,
    }


def _check_count(tokens: Sequence[int]) -> None:
    if len(tokens) > TOKENS_MAX:
        raise BadRecordError(f"sample has {len(tokens)} tokens, expected at most {TOKENS_MAX}", rule="tokens")


def token_arrays(encoded: Mapping[str, Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Return the tokens, and a one for each that is learned."""
    tokens_T = np.array(encoded["tokens"], dtype=np.uint32)
    learned_T = np.zeros(tokens_T.size, dtype=np.uint8)
    for start, stop in encoded["learned"]:
        learned_T[start:stop] = 1
    return tokens_T, learned_T


def _add_image(tokens: list[int], form: ChatFormat, cells: int) -> list[int]:
    """Add the tokens of one image; return the first of them, and the one after the last."""
    start = len(tokens)
    tokens += [*form.image_before, *[form.media] * cells, *form.image_after]
    return [start, len(tokens)]


def _learn(ranges: list[list[int]], start: int, stop: int) -> None:
    """Append a range of learned tokens."""
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1][1] = stop
    else:
        ranges.append([start, stop])
