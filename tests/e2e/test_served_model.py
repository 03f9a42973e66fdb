"""A model is served as the how-to says, by a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.main import get_command

from polyreme.main import app
from tests.kept.folders import FINISHED, VERSIONS, copy_home

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/ask-and-serve.md"
MANIFEST = ROOT / "manifests/serving/serve.yaml"
WAIT_S_MAX = 60.0

pytestmark = pytest.mark.slow


def test_the_client_of_the_how_to_is_answered_until_the_server_is_stopped(tmp_path: Path) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "page.png")
    home = copy_home(VERSIONS[0], tmp_path)
    command = [sys.executable, "-m", "polyreme.main", "--home", str(home), "serve", FINISHED, "--port", "0"]
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
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S_MAX) == 0


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
