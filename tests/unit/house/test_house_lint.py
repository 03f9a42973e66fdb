"""The configuration of the linters: each layer and each ban is planted against, and must be found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import repo_checks

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source roots and their configuration, to plant in."""
    copy = tmp_path_factory.mktemp("tree")
    for root in repo_checks.SOURCE_ROOTS:
        shutil.copytree(ROOT / root, copy / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def layers(tree: Path) -> str:
    """What import-linter says of a tree, found before the installed packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / root) for root in repo_checks.SOURCE_ROOTS)}
    command = [str(BIN / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "line", "contract"),
    [
        ("operator/polyreme_operator", "import polyreme_datahub", "Planes do not import each other"),
        ("trainer/polyreme_trainer", "import polyreme_operator", "Planes do not import each other"),
        ("api/polyreme_api", "import polyreme_trainer", "Planes do not import each other"),
        ("datahub/polyreme_datahub", "import polyreme.main", "Planes do not import each other"),
        ("api/polyreme_api", "def now():\n    import time", "API, planner and the launcher's protocol do no I/O"),
        ("api/polyreme_api", "import yaml", "API, planner and the launcher's protocol do no I/O"),
        ("datahub/polyreme_datahub", "import torch", "Only the trainer, the launcher's ranks"),
        ("operator/polyreme_operator/types", "import polyreme_operator.scheduler", "Operator: I/O over the cache"),
        (
            "operator/polyreme_operator/scheduler",
            "import polyreme_cluster.adapters.kubernetes.cluster",
            "The operator decides from its arguments alone",
        ),
        ("operator/polyreme_cluster", "import polyreme_operator.settings", "Planes do not import each other"),
        ("trainer/polyreme_launcher", "import polyreme_cluster.port", "A pod of a job, the node agent"),
        ("operator/polyreme_operator/scheduler", "import random", "The operator decides from its arguments alone"),
        ("trainer/polyreme_trainer/model", "import polyreme_trainer.train", "Trainer: the loop over checkpoints"),
        (
            "trainer/polyreme_trainer/parallel",
            "import polyreme_trainer.checkpoint",
            "No import cycles between",
        ),
        ("trainer/polyreme_trainer/model", "import time", "The model does no I/O"),
        ("datahub/polyreme_datahub/index", "import polyreme_datahub.operations", "Datahub: the whole over loading"),
        ("datahub/polyreme_datahub/index", "import random", "What the digests and the index mean"),
    ],
)
def test_a_planted_import_breaks_its_layer(tree: Path, folder: str, line: str, contract: str) -> None:
    planted = tree / folder / "planted.py"
    planted.write_text(f"{line}\n")
    try:
        said = layers(tree)
    finally:
        planted.unlink()
    assert any(row.startswith(contract) and "BROKEN" in row for row in joined(said)), said


def joined(report: str) -> list[str]:
    """Rows of the report, one for each contract: long names are wrapped."""
    return report.replace("BROKEN", "BROKEN\n").replace("KEPT", "KEPT\n").replace(" \n", " ").splitlines()


@pytest.mark.parametrize(
    ("name", "source", "rule"),
    [
        ("operator/polyreme_operator/reconcile/x.py", '"""X."""\nimport time\n\nNOW = time.time()\n', "TID251"),
        ("trainer/polyreme_trainer/train/x.py", '"""X."""\nimport random\n\nA = random.random()\n', "TID251"),
        ("datahub/polyreme_datahub/x.py", '"""X."""\nprint(1)\n', "T201"),
        ("api/polyreme_api/x.py", "A = 1\n", "D100"),
        ("tests/unit/x.py", "try:\n    A = 1\nexcept Exception:\n    A = 2\n", "BLE001"),
    ],
)
def test_a_planted_offence_breaks_its_rule(name: str, source: str, rule: str) -> None:
    assert rule in offences(name, source)


@pytest.mark.parametrize(
    "name", ["cli/polyreme/clock.py", "operator/polyreme_cluster/adapters/x/y.py", "tests/unit/x.py"]
)
def test_the_shells_may_read_the_clock(name: str) -> None:
    assert "TID251" not in offences(name, '"""X."""\nimport time\n\nNOW = time.time()\n')


def offences(name: str, source: str) -> str:
    command = [str(BIN / "ruff"), "check", "--no-cache", "--output-format=concise", "--stdin-filename", name, "-"]
    return subprocess.run(command, cwd=ROOT, input=source, check=False, capture_output=True, text=True).stdout
