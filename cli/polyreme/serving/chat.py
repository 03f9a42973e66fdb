"""Chat completions in OpenAI's form: what a client may ask, and what it is answered.

Images come as ``data:`` URLs alone: a server that fetched addresses for its clients would reach what they can't.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyreme.serving.answers import Answer
from polyreme_api.errors import InvalidConfigError
from polyreme_api.load import rule_words
from polyreme_datahub.chat_format import IMAGE_MARK
from polyreme_datahub.prompts import PromptReader

DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "top_p": (None, 1),
    "top_k": (None, -1),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
"""Fields that would change an answer and are not done, and the values that change nothing."""


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Url(_Read):
    url: str


class _TextPart(_Read):
    type: Literal["text"]
    text: str


class _ImagePart(_Read):
    type: Literal["image_url"]
    image_url: _Url


class _Message(_Read):
    role: str
    content: str | list[_TextPart | _ImagePart]

    @property
    def parts(self) -> Sequence[_TextPart | _ImagePart]:
        """Its texts and images."""
        return [_TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class _StreamOptions(_Read):
    include_usage: bool = False


class ChatRequest(_Read):
    """A request; fields that change no answer are ignored."""

    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    logprobs: bool | None = False

    @property
    def tokens_max(self) -> int | None:
        """Longest answer that is asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> tuple[list[dict[str, str]], list[bytes]]:
        """Return the turns, with a mark for each image, and the images.

        Raises:
            InvalidConfigError: If an image is no ``data:`` URL, or a text holds a mark.
        """
        turns: list[dict[str, str]] = []
        images: list[bytes] = []
        for number, message in enumerate(self.messages):
            texts = []
            for part in message.parts:
                if isinstance(part, _ImagePart):
                    images.append(_decoded(part.image_url.url, number))
                    texts.append(IMAGE_MARK)
                elif IMAGE_MARK in part.text:
                    raise InvalidConfigError(
                        f"messages[{number}] has {IMAGE_MARK} in a text, expected each image as a part of its own"
                    )
                else:
                    texts.append(part.text)
            turns.append({"role": message.role, "content": "".join(texts)})
        return turns, images


def parse_request(value: Any) -> ChatRequest:
    """Read a request.

    Raises:
        InvalidConfigError: Naming the field that breaks a rule.
    """
    if not isinstance(value, dict):
        raise InvalidConfigError(f"request is a {type(value).__name__}, expected a JSON object")
    for field, harmless in UNSUPPORTED.items():
        if field in value and value[field] not in harmless:
            raise InvalidConfigError(f"{field} is not supported; leave it out")
    try:
        return ChatRequest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidConfigError(f"{place} is not valid: {rule_words(first)}") from error


def _decoded(url: str, number: int) -> bytes:
    found = DATA_URL.match(url)
    if found is None:
        raise InvalidConfigError(
            f"messages[{number}] has an image at {url[:32]!r}, expected data:image/...;base64,...: nothing is fetched"
        )
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidConfigError(f"messages[{number}] has an image that is no base64: {error}") from error


class TextStream:
    """Text of tokens as they come: a character that several tokens make comes with the last of them."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        return self._decoder.decode(self._reader.token_bytes(token))

    def end(self) -> str:
        """Return what is left."""
        return self._decoder.decode(b"", final=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What all parts of one response share."""

    id: str
    created: int
    model: str
    reader: PromptReader
    log_probs: bool

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the response to a request without ``stream``."""
        message = {"role": "assistant", "content": self.reader.text(answer.tokens)}
        choice = {"index": 0, "message": message, "finish_reason": _reason(answer), "logprobs": None}
        if self.log_probs:
            choice["logprobs"] = {
                "content": [self._log_prob(*both) for both in zip(answer.tokens, answer.log_probs, strict=True)]
            }
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def chunk(
        self, text: str, *, token: int | None = None, log_prob: float = 0.0, first: bool = False
    ) -> dict[str, Any]:
        """Return the event of a token."""
        delta = {**({"role": "assistant"} if first else {}), "content": text}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        if self.log_probs and token is not None:
            choice["logprobs"] = {"content": [self._log_prob(token, log_prob)]}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def last_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the event that ends an answer."""
        choice = {"index": 0, "delta": {}, "finish_reason": _reason(answer), "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the event that counts tokens."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(answer)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _log_prob(self, token: int, log_prob: float) -> dict[str, Any]:
        data = self.reader.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": log_prob, "bytes": list(data), "top_logprobs": []}


def error_body(message: str, code: int) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _reason(answer: Answer) -> str:
    return "stop" if answer.ended else "length"


def _usage(answer: Answer) -> dict[str, int]:
    made = len(answer.tokens) + answer.ended
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": answer.prompt_tokens + made,
    }
