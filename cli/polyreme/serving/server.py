"""A server of answers over HTTP, in the form of OpenAI's chat completions.

The loop reads requests and writes responses; one thread decodes images (in a sandbox) and makes prompts, another one
owns the engine. A request holds a place from its first byte to its last one: with no place free it is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from polyreme.serving.access import Access
from polyreme.serving.answers import Answer, take
from polyreme.serving.chat import ChatRequest, Completion, TextStream, error_body, parse_request
from polyreme.serving.engine_thread import Answering, EngineThread
from polyreme.serving.metrics import ServeMetrics
from polyreme.serving.places import Place, Places, ServerLimits
from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError, PolyremeError, RefusedError
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.prompts import Prompt, PromptReader
from polyreme_trainer.serve.engine import Made, Request

BODY_S = 30.0
"""Longest time to receive a request."""
CLIENT_LEFT = "499"
"""Code by which such requests are counted, as nginx does."""
SEED_BITS = 63
CHAT, MODELS, METRICS, HEALTH = "/v1/chat/completions", "/v1/models", "/metrics", "/healthz"

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestError(Exception):
    """A request that gets no answer: the status and the sentence of its response."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class AnswerServer:
    """Handles requests."""

    def __init__(
        self,
        name: str,
        reader: PromptReader,
        engine: EngineThread,
        *,
        access: Access,
        limits: ServerLimits,
        clock: Clock,
    ) -> None:
        """Hold no request.

        Args:
            name: Of the model.
            reader: Makes prompts; only this server uses it.
            engine: Answers them; it is started.
            access: Who may ask.
            limits: What clients may use.
            clock: Of this machine.
        """
        self.metrics = ServeMetrics()
        self._name, self._reader, self._engine, self._access = name, reader, engine, access
        self._limits, self._clock = limits, clock
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._places = Places(limits.requests)
        self._created = int(clock.now_s())

    def application(self) -> web.Application:
        """Return the routes."""
        made = web.Application(client_max_size=self._limits.body_bytes, middlewares=[self._guard])
        made.router.add_post(CHAT, self._chat)
        made.router.add_get(MODELS, self._models)
        made.router.add_get(METRICS, self._show_metrics)
        made.router.add_get(HEALTH, self._healthz)
        return made

    def close(self) -> None:
        """End the thread of prompts, and with it the sandbox."""
        self._prompts.submit(self._reader.close)
        self._prompts.shutdown()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check who asks, count what they are answered, and say errors in one form."""
        try:
            if request.path != HEALTH:
                self._check_access(request)
            response = await handler(request)
        except asyncio.CancelledError:
            self.metrics.requests.labels(CLIENT_LEFT).inc()
            raise
        except RequestError as error:
            response = _refused(error.code, error.message)
        except web.HTTPException as error:
            response = _refused(error.status, f"{error.reason.lower()}: {request.method} {request.path[:64]}")
        if request.path == CHAT:
            self.metrics.requests.labels(str(response.status)).inc()
        return response

    def _check_access(self, request: web.Request) -> None:
        refusal = self._access.refusal(
            authorization=request.headers.get("Authorization", ""), host=request.headers.get("Host", "")
        )
        if refusal is not None:
            raise RequestError(*refusal)

    async def _healthz(self, _: web.Request) -> web.Response:
        alive = self._engine.is_alive
        return web.Response(status=200 if alive else 503, text="ok\n" if alive else "the engine does not answer\n")

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "polyreme"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": self._limits.tokens}]})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        self.metrics.pages.set(self._engine.pages)
        self.metrics.pages_used.set(self._engine.pages_used)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        began_s = self._clock.steady_s()
        place = self._take_place()
        response: web.StreamResponse | None = None
        try:
            async with asyncio.timeout(self._limits.request_s):
                asked = await self._read(request)
                prompt = await self._prompt(asked, place)
                with self._answering(asked, prompt) as (answering, made):
                    answer = Answer(prompt_tokens=len(prompt.prompt_tokens))
                    async with contextlib.aclosing(self._tokens(answering, answer, began_s)) as tokens:
                        if not asked.stream:
                            async for _ in tokens:
                                pass
                            return web.json_response(made.whole(answer))
                        response = await _open_stream(request)
                        await _write_stream(response, made, tokens, answer, usage=_wants_usage(asked))
        except TimeoutError:
            error = RequestError(504, f"no answer within {self._limits.request_s:g} s")
            if response is None:
                raise error from None
            await _end_stream(response, error)
        except RequestError as error:
            if response is None:
                raise
            await _end_stream(response, error)
        finally:
            place.leave()
        return response

    def _take_place(self) -> Place:
        """Let a request in.

        Raises:
            RequestError: If there are too many, or the engine does not answer.
        """
        if not self._engine.is_alive:
            raise RequestError(503, "unavailable: the engine does not answer; see the server's log")
        place = self._places.take()
        if place is None:
            raise RequestError(
                429, f"too many requests: {self._limits.requests} are answered or wait, expected fewer; try again later"
            )
        return place

    async def _read(self, request: web.Request) -> ChatRequest:
        if request.content_type != "application/json":
            raise RequestError(415, f"content type is {request.content_type[:64]!r}, expected application/json")
        try:
            async with asyncio.timeout(BODY_S):
                asked = parse_request(json.loads(await request.read()))
        except TimeoutError:
            raise RequestError(408, f"request did not come whole within {BODY_S:g} s") from None
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestError(
                413, f"request is too large, expected at most {self._limits.body_bytes} bytes; send smaller images"
            ) from error
        except InvalidConfigError as error:
            raise RequestError(400, error.message) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"request is not JSON: {error}") from error
        if asked.model is not None and asked.model != self._name:
            raise RequestError(404, f"no model {asked.model[:64]!r}: this server has {self._name!r}")
        return asked

    async def _prompt(self, asked: ChatRequest, place: Place) -> Prompt:
        """Make a prompt; its place is taken until that is done, also if the client has left."""

        def make() -> Prompt:
            return self._reader.read(*asked.conversation())

        made = asyncio.get_running_loop().run_in_executor(self._prompts, make)
        place.keep(made)
        try:
            prompt = await asyncio.shield(made)
        except (BadRecordError, InvalidConfigError) as error:
            raise RequestError(400, error.message) from error
        except PolyremeError as error:
            _log.error("prompt failed: %s", error)
            raise RequestError(503, f"unavailable: {error.message}") from error
        if (count := len(prompt.prompt_tokens) + (asked.tokens_max or 1)) > self._limits.tokens:
            raise RequestError(
                400,
                f"request is too long: {len(prompt.prompt_tokens)} tokens of the prompt and {asked.tokens_max or 1} of "
                f"the answer are {count}, expected at most {self._limits.tokens}",
            )
        return prompt

    @contextlib.contextmanager
    def _answering(self, asked: ChatRequest, prompt: Prompt) -> Iterator[tuple[Answering, Completion]]:
        """Have a prompt answered; when the block ends, with or without an answer, the engine forgets it."""
        seed = secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed % (1 << SEED_BITS)
        answering = self._engine.begin(
            Request(
                prompt=prompt,
                new_tokens_max=asked.tokens_max or self._limits.tokens - len(prompt.prompt_tokens),
                stop_token=self._reader.token_ids.end,
                temperature=asked.temperature or 0.0,
                seed=seed,
            )
        )
        made = Completion(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(self._clock.now_s()),
            model=self._name,
            reader=self._reader,
            log_probs=bool(asked.logprobs),
        )
        try:
            yield answering, made
        finally:
            self._engine.forget(answering)

    async def _tokens(self, answering: Answering, answer: Answer, began_s: float) -> AsyncGenerator[Made, None]:
        """Add the tokens of an answer as they come, and yield them.

        Raises:
            RequestError: If the engine refuses or fails.
        """
        first_s, gauge = 0.0, self.metrics.waiting
        gauge.inc()
        try:
            while True:
                made = await answering.came.get()
                if isinstance(made, PolyremeError):
                    raise RequestError(400 if isinstance(made, RefusedError) else 500, made.message)
                if not first_s:
                    first_s = self._clock.steady_s()
                    self.metrics.first_token_s.observe(first_s - began_s)
                    self.metrics.prompt_tokens.inc(answer.prompt_tokens)
                    gauge.dec()
                    gauge = self.metrics.running
                    gauge.inc()
                self.metrics.answer_tokens.inc()
                take(answer, made.token, made.log_prob, stop_token=answering.request.stop_token)
                yield made
                if made.ended:
                    break
            took_s, later = self._clock.steady_s() - first_s, len(answer.tokens) + answer.ended - 1
            if later and took_s > 0:
                self.metrics.tokens_per_s.observe(later / took_s)
        finally:
            gauge.dec()


def _wants_usage(asked: ChatRequest) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


def _refused(code: int, message: str) -> web.Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "10"}}
    return web.json_response(error_body(message, code), status=code, headers=headers.get(code))


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def _write_stream(
    response: web.StreamResponse, made: Completion, tokens: AsyncGenerator[Made, None], answer: Answer, *, usage: bool
) -> None:
    """Write an answer as events, one a token."""
    text = TextStream(made.reader)
    first = True
    async for token in tokens:
        if len(answer.tokens) and not answer.ended:
            event = made.chunk(text.add(token.token), token=token.token, log_prob=token.log_prob, first=first)
            await _write(response, event)
            first = False
    if (rest := text.end()) or first:
        await _write(response, made.chunk(rest, first=first))
    await _write(response, made.last_chunk(answer))
    if usage:
        await _write(response, made.usage_chunk(answer))
    await _finish(response)


async def _end_stream(response: web.StreamResponse, error: RequestError) -> None:
    """Say in an answer that has begun why it ends."""
    with contextlib.suppress(ConnectionError):
        await _write(response, error_body(error.message, error.code))
        await _finish(response)


async def _finish(response: web.StreamResponse) -> None:
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n")
