"""A served model's log-probabilities over HTTP, in the form of OpenAI's completions as vLLM extends it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError

FIELD = "URL"
TIMEOUT_S = 300.0
SAID_MAX = 300
"""Characters of a server's refusal that are shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """What a server wrote."""

    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]


class ServedModel:
    """A server, and the model that it serves."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Name a server by its base URL, with or without ``/v1``.

        Args:
            url: Where it listens.
            token: What it wants as a Bearer; None: nothing.

        Raises:
            InvalidConfigError: If it is no URL.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidConfigError(f"not a server: {url!r}, expected http://HOST:PORT", field=FIELD)
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = ""
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    @property
    def model(self) -> str:
        """Name of the model, the first that the server lists."""
        if not self._model:
            listed = self._ask("models")
            self._model = _part(listed, ("data", 0, "id"), "the models that it serves")
        return self._model

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first."""
        request = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        found = self._ask("completions", request)
        scores = _part(found, ("choices", 0, "logprobs", "token_logprobs"), "log-probabilities of a prompt (echo)")
        return [float(score) for score in scores[1 : len(tokens)]]

    def answer(self, question: str, image: bytes, *, tokens_max: int) -> ServedAnswer:
        """Ask about an image; the answer is the most likely one."""
        shown = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": question}]
        request = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens_max,
            "temperature": 0,
            "logprobs": True,
            "return_token_ids": True,
        }
        found = self._ask("chat/completions", request)
        scores = _part(found, ("choices", 0, "logprobs", "content"), "log-probabilities of an answer")
        return ServedAnswer(
            prompt_tokens=_part(found, ("prompt_token_ids",), "a prompt's tokens (return_token_ids)"),
            tokens=_part(found, ("choices", 0, "token_ids"), "an answer's tokens (return_token_ids)"),
            log_probs=[float(score["logprob"]) for score in scores],
        )

    def _ask(self, path: str, request: Mapping[str, Any] | None = None) -> Any:
        named = None if request is None else {"model": self.model, **request}
        try:
            return asyncio.run(self._call(path, named))
        except InvalidConfigError:  # a ValueError, too
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EnvironmentFailedError(
                f"server does not answer: {self._url}/{path} ({type(error).__name__}: {error})", field=FIELD
            ) from error

    async def _call(self, path: str, request: Mapping[str, Any] | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            url = f"{self._url}/{path}"
            async with session.get(url) if request is None else session.post(url, json=request) as response:
                if not response.ok:
                    said = (await response.text())[:SAID_MAX]
                    raise _refusal(path, f"server refuses: {url} says {response.status}, {said}", response.status)
                return await response.json(content_type=None)


def _refusal(path: str, words: str, status: int) -> InvalidConfigError:
    if status == 404 and path == "completions":
        words += "; polyreme serve has no completions and can't be checked"
    return InvalidConfigError(words, field="--token-file" if status in {401, 403} else FIELD)


def _part(found: Any, path: Sequence[str | int], words: str) -> Any:
    """Return a part of a response.

    Raises:
        InvalidConfigError: If it has none.
    """
    try:
        for step in path:
            found = found[step]
    except (KeyError, IndexError, TypeError):
        found = None
    if found is None:
        raise InvalidConfigError(f"server does not give {words}; vLLM does", field=FIELD)
    return found
