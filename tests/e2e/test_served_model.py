"""A model is served as the how-to says, by a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.main import get_command

from polyreme.main import app
from polyreme.serving.server import CHAT, METRICS
from tests.kept.folders import FINISHED, VERSIONS, copy_home

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/ask-and-serve.md"
MANIFEST = ROOT / "manifests/serving/serve.yaml"
WAIT_S_MAX = 60.0
CONTEXT = 256
"""Longest answer: a second or more, so that a client can leave during it."""

pytestmark = pytest.mark.slow


def test_the_client_of_the_how_to_is_answered_until_the_server_is_stopped(tmp_path: Path) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "page.png")
    home = copy_home(VERSIONS[0], tmp_path)
    command = [sys.executable, "-m", "polyreme.main", "--home", str(home), "serve", FINISHED, "--port", "0"]
    command += ["--context", str(CONTEXT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert url is not None, said
            (client,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
            done = subprocess.run(
                [sys.executable, "-c", client.replace("http://127.0.0.1:8000", url[0])],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=WAIT_S_MAX,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
            leave_early(url[0])
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S_MAX) == 0


def leave_early(url: str) -> None:
    """Leave after the first token of an answer; the server stops to answer, and counts that."""
    messages = [{"role": "user", "content": "Which digits?"}]
    body = json.dumps({"messages": messages, "stream": True, "temperature": 2.0, "seed": 0}).encode()
    request = urllib.request.Request(url + CHAT, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S_MAX) as response:
        assert response.readline().startswith(b"data: ")
    until_s = time.monotonic() + WAIT_S_MAX
    while b'polyreme_serve_requests_total{code="499"} 1.0' not in (seen := read(url + METRICS)):
        assert time.monotonic() < until_s, seen
        time.sleep(0.05)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S_MAX) as response:
        content: bytes = response.read()
    return content


def test_the_deployment_has_options_and_probes_that_the_server_knows() -> None:
    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    program, name, *arguments = container["command"]
    assert program == "polyreme"
    options = get_command(app).commands[name].make_context(name, arguments).params  # type: ignore[attr-defined]
    (port,) = container["ports"]
    assert (options["port"], port["name"]) == (port["containerPort"], service["spec"]["ports"][0]["targetPort"])
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/healthz", "port": port["name"]}] * 3
