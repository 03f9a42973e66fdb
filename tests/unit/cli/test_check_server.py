"""A server whose log-probabilities are not the model's is found, however fluently it answers."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyreme.commands.asked_model import AskedModel, open_asked
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme.serving.log_probs import log_probs
from polyreme_datahub.prompts import Prompt
from tests.kept.folders import FINISHED, VERSIONS, copy_home

ANSWER = [20, 21, 22]
KEY = "key-1"
Change = Callable[[dict[str, Any]], None]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(path=copy_home(VERSIONS[0], tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def asked(home: Home) -> AskedModel:
    return open_asked(home, FINISHED, None)


@pytest.fixture
def call(home: Home, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run ``polyreme checkpoint check-server``; return its exit code and what it wrote."""

    def call(url: str, *arguments: str) -> tuple[int, str, str]:
        command = ["checkpoint", "check-server", FINISHED, url, "--prompts", "2", *arguments]
        return invoke(["--home", str(home.path), *command]), *capsys.readouterr()

    return call


@contextlib.contextmanager
def served(
    asked: AskedModel, change: Change = lambda response: None, *, token: str = "", texts: bool = True
) -> Iterator[str]:
    """Serve a model in vLLM's form to those with a token; ``change`` is made to each response."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if token and self.headers["Authorization"] != f"Bearer {token}":
                self.reply({"error": "Unauthorized"}, 401)
            else:
                self.reply({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] == "served"
            assert not token or self.headers["Authorization"] == f"Bearer {token}"
            if "prompt" not in request:
                self.reply(chat(asked, request["messages"]))
            elif texts:
                self.reply(completion(asked, request["prompt"]))
            else:
                self.reply({"error": "Not Found"}, 404)

        def reply(self, response: dict[str, Any], status: int = 200) -> None:
            change(response)
            body = json.dumps(response).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def completion(asked: AskedModel, tokens: Sequence[int]) -> dict[str, Any]:
    prompt = Prompt(prompt_tokens=tokens, patches_PC=np.zeros((0, 588), np.uint8), grids_I2=np.zeros((0, 2), np.int32))
    # The last one is that of the token that was made.
    return {"choices": [{"logprobs": {"token_logprobs": [None, *log_probs(asked.model, prompt), -1.0]}}]}


def chat(asked: AskedModel, messages: Any) -> dict[str, Any]:
    image, text = messages[0]["content"]
    data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
    with asked.reader() as reader:
        prompt = reader.read([{"role": "user", "content": text["text"]}], [data])
    scores = log_probs(asked.model, prompt, ANSWER)[-len(ANSWER) :]
    content = [{"logprob": score} for score in scores]
    choice = {"token_ids": ANSWER, "logprobs": {"content": content}}
    return {"prompt_token_ids": list(prompt.prompt_tokens), "choices": [choice]}


@pytest.fixture
def page(tmp_path: Path) -> str:
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (56, 84), dtype=np.uint8)).save(tmp_path / "page.png")
    return str(tmp_path / "page.png")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(f"{KEY}\n")
    return tmp_path / "key"


@pytest.mark.slow
def test_the_same_model_is_found_to_be_the_same(asked: AskedModel, call: Call, page: str, key: Path) -> None:
    with served(asked, token=KEY) as url:
        code, said, _ = call(url, "--image", page, "-o", "json", "--token-file", str(key))
    item = json.loads(said)["item"]
    assert code == 0
    assert item["prompts"] == 3
    assert item["tokens"] == 2 * 47 + len(ANSWER)
    assert item["worst"] < 1e-4


def test_a_refusal_of_the_server_is_said_as_one(asked: AskedModel, call: Call, key: Path) -> None:
    with served(asked, token=KEY) as url:
        code, _, said = call(url)
        assert code == 2
        assert f'server refuses: {url}/models says 401, {{"error": "Unauthorized"}}; change --token-file' in said
        key.write_text("wrong-key")
        code, written, said = call(url, "--token-file", str(key))
        assert code == 2
        assert "wrong-key" not in written + said
    with served(asked, texts=False) as url:
        code, _, said = call(url)
    assert code == 2
    assert f"server refuses: {url}/completions says 404, " in said
    assert "; polyreme serve has no completions and can't be checked; change URL" in said


def _one_token(response: dict[str, Any]) -> None:
    for choice in response.get("choices", ()):
        if "token_logprobs" in choice["logprobs"]:
            choice["logprobs"]["token_logprobs"][40] -= 1.5


def _prompt(response: dict[str, Any]) -> None:
    response.get("prompt_token_ids", [0]).pop()


def _no_scores(response: dict[str, Any]) -> None:
    for choice in response.get("choices", ()):
        choice["logprobs"] = None


DIFFERENT = {
    "one token": (_one_token, 4, "a log-probability of model served differs by 1.5 (mean 0.0"),
    "the prompt": (_prompt, 4, "server reads a question as other tokens: "),
    "no scores": (_no_scores, 2, "server does not give log-probabilities of a prompt (echo); vLLM does; change URL"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DIFFERENT)
def test_another_model_is_found_in_one_sentence(asked: AskedModel, call: Call, page: str, case: str) -> None:
    change, expected, sentence = DIFFERENT[case]
    with served(asked, change) as url:
        code, _, said = call(url, "--image", page)
    assert code == expected
    assert sentence in said


def test_a_server_that_is_not_there_is_named(call: Call) -> None:
    code, _, said = call("http://127.0.0.1:1")
    assert code == 7
    assert "server does not answer: http://127.0.0.1:1/v1/models (ClientConnectorError" in said
    assert call("127.0.0.1:8000")[0] == 2
