"""A server of answers: what clients get, what they are refused, and what they may not do to each other."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from PIL import Image

from polyreme.commands.asked_model import AskedModel, open_asked
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme.serving.access import Access, check_address, read_token
from polyreme.serving.engine_thread import EngineThread
from polyreme.serving.places import ServerLimits
from polyreme.serving.server import CHAT, AnswerServer
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_system.clock import SystemClock
from polyreme_trainer.serve.answers import settings_for
from polyreme_trainer.serve.engine import Engine, Made
from tests.kept.folders import FINISHED, VERSIONS, copy_home

pytestmark = pytest.mark.slow

LIMITS = ServerLimits(requests=8, body_bytes=100_000, request_s=60.0, tokens=96)
TOKENS = 8
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> AskedModel:
    """The model of a run whose checkpoint is gone since it was read."""
    home = Home(path=copy_home(VERSIONS[0], tmp_path_factory.mktemp("served")))
    opened = open_asked(home, FINISHED, None)
    shutil.rmtree(home.run("default", FINISHED).checkpoints)
    return opened


class Gated(Engine):
    """An engine that waits before each step until the gate is open, and fails where it is asked to."""

    gate = threading.Event()
    fails = False

    def step(self) -> list[Made]:
        self.gate.wait()
        if Gated.fails:
            Gated.fails = False
            raise RuntimeError("broken")
        return super().step()


class Client:
    """A client of a server."""

    def __init__(self, session: ClientSession, server: TestServer, thread: EngineThread) -> None:
        self.session, self.server, self.thread = session, server, thread

    async def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        async with self.session.post(self.server.make_url(CHAT), data=data, headers=given) as response:
            return response.status, await response.json()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.session.post(self.server.make_url(CHAT), json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(self.server.make_url("/metrics")) as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def serve(
    asked: AskedModel,
    use: Callable[[Client], Awaitable[None]],
    *,
    limits: ServerLimits = LIMITS,
    token: str | None = None,
    engine: type[Engine] = Engine,
) -> None:
    """Serve a model while a client uses it."""

    async def run() -> None:
        settings = settings_for(asked.model, tokens_max=limits.tokens, rows_max=3)
        thread = EngineThread(lambda: engine(asked.model, settings), SystemClock())
        thread.start()
        answers = AnswerServer(
            asked.name, asked.reader(), thread, access=Access(token), limits=limits, clock=SystemClock()
        )
        server = TestServer(answers.application())
        await server.start_server()
        try:
            async with ClientSession() as session:
                await use(Client(session, server, thread))
        finally:
            await server.close()
            thread.stop()
            answers.close()

    asyncio.run(asyncio.wait_for(run(), 120.0))


def picture(side: int, shade: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (side, 28), (shade, 255 - shade, 40)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(number: int, **fields: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": picture(28 * (1 + number % 3), number * 20)}}
    text = {"type": "text", "text": f"Which digits, in {number}?"}
    return {"messages": [{"role": "user", "content": [image, text]}], "max_tokens": TOKENS, **fields}


def alone(asked: AskedModel, count: int) -> list[str]:
    """Answers to questions that are asked one after the other."""
    found = []
    with asked.reader() as reader:
        for number in range(count):
            url = question(number)["messages"][0]["content"][0]["image_url"]["url"]
            image = base64.b64decode(url.partition(",")[2])
            prompt = reader.read([{"role": "user", "content": f"Which digits, in {number}?"}], [image])
            (answer,) = asked.answers(
                [prompt], stop_token=reader.token_ids.end, prompt_tokens_max=96, new_tokens_max=TOKENS, rows=1
            )
            assert answer is not None
            found.append(reader.text(answer.tokens))
    return found


def test_clients_at_once_get_the_answers_that_each_would_get_alone(asked: AskedModel) -> None:
    """Streamed or not; the checkpoint is gone meanwhile."""
    wanted = alone(asked, 6)
    assert len(set(wanted)) > 2

    async def use(client: Client) -> None:
        async def one(number: int) -> str:
            if number % 2:
                _, body = await client.post(question(number, logprobs=True))
                (choice,) = body["choices"]
                tokens = choice["logprobs"]["content"]
                text = bytes(byte for token in tokens for byte in token["bytes"]).decode("utf-8", "replace")
                assert text == choice["message"]["content"]
                assert body["usage"]["completion_tokens"] == len(tokens) + (choice["finish_reason"] == "stop")
                assert all(token["logprob"] < 0 for token in tokens)
                return text
            options = {"stream_options": {"include_usage": True}}
            *events, last, usage = [event async for event in client.stream(question(number, **options))]
            assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            assert last["choices"][0]["finish_reason"] in {"stop", "length"}
            assert usage["usage"]["completion_tokens"] <= TOKENS
            return "".join(event["choices"][0]["delta"]["content"] for event in events)

        assert list(await asyncio.gather(*map(one, range(6)))) == wanted
        seen = await client.metrics()
        assert seen['polyreme_serve_requests_total{code="200"}'] == 6
        assert seen["polyreme_serve_first_token_seconds_count"] == 6
        assert seen["polyreme_serve_answer_tokens_total"] >= 6
        assert (seen["polyreme_serve_waiting"], seen["polyreme_serve_running"]) == (0, 0)
        assert (seen["polyreme_serve_cache_pages"] > 0, seen["polyreme_serve_cache_pages_used"]) == (True, 0)

    serve(asked, use)


def test_a_seed_draws_the_same_answer_again(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        async def text(seed: int) -> str:
            _, body = await client.post(question(1, temperature=2, seed=seed))
            return str(body["choices"][0]["message"]["content"])

        drawn = [await text(seed) for seed in (5, 5, -5, 7)]
        assert drawn[0] == drawn[1]
        assert len(set(drawn)) > 1

    serve(asked, use)


def with_image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def bomb() -> str:
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


HELLO = {"messages": [{"role": "user", "content": "hello"}]}
REFUSED: list[tuple[Any, int, str]] = [
    (with_image("http://example.com/a.png"), 400, "nothing is fetched"),
    (with_image("data:image/png;base64,@@"), 400, "no base64"),
    (with_image("data:image/png;base64,aGVsbG8="), 400, "not an image: begins with b'hello'"),
    (with_image(bomb()), 400, "image is too large: 20000 x 20000 pixels"),
    (with_image(picture(28, 0) + "A" * 200_000), 413, "expected at most 100000 bytes"),
    ({"messages": [{"role": "user", "content": "see <image>"}]}, 400, "each image as a part of its own"),
    ({"messages": [{"role": "user", "content": " "}]}, 400, "nothing is asked"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400, "with role one of system, user, assistant"),
    ({"messages": []}, 400, "messages is not valid"),
    ({}, 400, "messages is not valid"),
    ([1], 400, "expected a JSON object"),
    (b"{", 400, "request is not JSON"),
    (b"[" * 50_000, 400, "request is not JSON"),
    ({**HELLO, "model": "gpt-4"}, 404, "no model 'gpt-4': this server has 'finished'"),
    ({**HELLO, "stop": ["."]}, 400, "stop is not supported"),
    ({**HELLO, "n": 2}, 400, "n is not supported"),
    ({**HELLO, "temperature": -1}, 400, "temperature is not valid"),
    ({**HELLO, "max_tokens": 1000}, 400, "expected at most 96"),
    ({"messages": [{"role": "user", "content": "word " * 200}]}, 400, "prompt is too long"),
]


def test_what_cannot_be_answered_is_refused_in_one_sentence(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        for body, code, sentence in REFUSED:
            status, said = await client.post(body)
            assert (status, sentence in said["error"]["message"]) == (code, True), (said, sentence)
        async with client.session.post(client.server.make_url(CHAT), data="{}") as response:
            assert response.status == 415
        async with client.session.get(client.server.make_url("/v1/chat")) as response:
            assert response.status == 404
        assert (await client.post(HELLO))[0] == 200

    serve(asked, use)


def test_a_request_beyond_the_queue_is_refused_at_once(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        Gated.gate.clear()
        two = [asyncio.ensure_future(client.post(question(number))) for number in range(2)]
        while (await client.metrics())["polyreme_serve_waiting"] < 2:
            await asyncio.sleep(0.01)
        status, said = await client.post(question(2))
        assert (status, "2 are answered or wait" in said["error"]["message"]) == (429, True)
        Gated.gate.set()
        assert [status for status, _ in await asyncio.gather(*two)] == [200, 200]
        assert (await client.post(question(2)))[0] == 200

    serve(asked, use, limits=dataclasses.replace(LIMITS, requests=2), engine=Gated)


def test_a_client_that_leaves_frees_its_place_and_its_pages(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        Gated.gate.clear()
        left = asyncio.ensure_future(client.post(question(0)))
        while (await client.metrics())["polyreme_serve_waiting"] < 1:
            await asyncio.sleep(0.01)
        left.cancel()
        while (await client.metrics())["polyreme_serve_waiting"]:
            await asyncio.sleep(0.01)
        Gated.gate.set()
        assert (await client.post(question(1)))[0] == 200
        seen = await client.metrics()
        assert seen["polyreme_serve_cache_pages_used"] == 0
        assert [seen[f'polyreme_serve_requests_total{{code="{code}"}}'] for code in (200, 499)] == [1, 1]

    serve(asked, use, limits=dataclasses.replace(LIMITS, requests=1), engine=Gated)


def test_a_request_that_takes_too_long_ends(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        Gated.gate.clear()
        status, said = await client.post(question(0))
        assert (status, said["error"]["message"]) == (504, "no answer within 0.5 s")
        Gated.gate.set()

    serve(asked, use, limits=dataclasses.replace(LIMITS, request_s=0.5), engine=Gated)


def test_an_engine_that_fails_drops_its_answers_and_answers_the_next(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        Gated.gate.set()
        Gated.fails = True
        status, said = await client.post(question(0))
        assert (status, said["error"]["message"]) == (500, "the step of the engine failed: broken")
        assert (await client.post(question(0)))[0] == 200

    serve(asked, use, engine=Gated)


def test_a_server_with_a_token_answers_who_brings_it(asked: AskedModel) -> None:
    async def use(client: Client) -> None:
        for given in ("", "Bearer", "Bearer a-token-of-some-lengtH", f"Basic {TOKEN}", "Bearer \u00e9"):
            assert (await client.post(HELLO, Authorization=given))[0] == 401
        assert (await client.post(HELLO, Authorization=f"Bearer {TOKEN}"))[0] == 200
        for path, code in (("/healthz", 200), ("/metrics", 401), ("/v1/models", 401)):
            async with client.session.get(client.server.make_url(path)) as response:
                assert response.status == code

    serve(asked, use, token=TOKEN)


def test_a_server_without_a_token_is_for_this_machine_alone(asked: AskedModel) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, None, name="TOKEN")
    check_address("0.0.0.0", TOKEN, name="TOKEN")
    for host in ("0.0.0.0", "", "10.0.0.1", "example.com"):
        with pytest.raises(InvalidConfigError, match="is not loopback and there is no token"):
            check_address(host, None, name="TOKEN")

    async def use(client: Client) -> None:
        for host, code in (("localhost:80", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example:80", 403)):
            async with client.session.get(client.server.make_url("/v1/models"), headers={"Host": host}) as response:
                assert response.status == code

    serve(asked, use)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "short").write_text("short")
    assert read_token(tmp_path / "token", "other", name="TOKEN") == TOKEN
    assert read_token(None, TOKEN, name="TOKEN") == TOKEN
    assert read_token(None, None, name="TOKEN") is None
    for file, variable in ((tmp_path / "short", None), (None, ""), (None, "with spaces in the middle")):
        with pytest.raises(InvalidConfigError, match="expected at least 16 printable"):
            read_token(file, variable, name="TOKEN")
    with pytest.raises(NotFoundError):
        read_token(tmp_path / "none", None, name="TOKEN")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nosuch", "--port", "0"), 3, "no run 'nosuch'"),
        (("nosuch", "--host", "0.0.0.0"), 2, "is not loopback and there is no token"),
        (("nosuch", "--token-file", "none"), 3, "no token file none"),
        (("nosuch", "--cache", "int9"), 2, "int9"),
        (("nosuch", "--port", "{port}"), 7, "can't listen on 127.0.0.1:{port}"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_weights_are_read(
    arguments: tuple[str, ...], code: int, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = invoke(["--home", str(tmp_path), "serve", *(word.format(port=port) for word in arguments)])
    assert (ended, sentence.format(port=port) in capsys.readouterr().err) == (code, True)
