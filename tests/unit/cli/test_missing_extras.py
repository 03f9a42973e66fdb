"""Commands in an environment that lacks the libraries of their role: one sentence that names the extra to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_api.extras import EXTRAS

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
for module in {modules!r}:
    sys.modules[module] = None
sys.argv[0] = {command!r}
from {module} import main
sys.exit(main())
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: a, context: {cluster: a}}]
current-context: a
"""


def call(module: str, command: str, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where kopf and kubernetes are not installed, as after `make quickstart`."""
    script = WITHOUT.format(modules=["kopf", "kubernetes"], module=module, command=command)
    (home / "kubeconfig").write_text(KUBECONFIG)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={"POLYREME_HOME": str(home), "KUBECONFIG": str(home / "kubeconfig"), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "command", "arguments", "extra"),
    [
        ("polyreme_datahub_service.main", "polyreme-datahub", [], "kubectl"),
        ("polyreme.main", "polyreme", ["node", "--name", "left", "--devices", "2"], "kubectl"),
        ("polyreme.plugin.main", "kubectl-polyreme", ["get"], "kubectl"),
        ("polyreme_operator.main", "polyreme-operator", ["--binding", "NodeAffinity"], "operator"),
    ],
    ids=["datahub", "node", "kubectl", "operator"],
)
def test_a_command_without_its_libraries_names_the_extra_in_one_sentence(
    module: str, command: str, arguments: list[str], extra: str, tmp_path: Path
) -> None:
    done = call(module, command, *arguments, home=tmp_path)
    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    assert f"pip install '.[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_operators_help_needs_no_library_of_its_service(tmp_path: Path) -> None:
    done = call("polyreme_operator.main", "polyreme-operator", "--help", home=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "--checkpoint-root" in done.stdout


def test_every_extra_that_is_named_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])
