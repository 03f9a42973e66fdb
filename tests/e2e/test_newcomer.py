"""The commands of README and how-tos that need no Kubernetes, run as they stand there, in a folder of a newcomer's."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documented import PAGES, ROOT, commands
from tests.e2e.polyreme_home import STARTING, called_here
from tests.e2e.small_jobs import record, write_jsonl, write_records
from tests.unit.datahub.shards_and_tables import rows_of, write_parquet, write_saved, write_shards

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HOW_TO = ROOT / "docs" / "how-to"
OVERRIDES = "tests/unit/cli/test_job_overrides"
ASK, SERVE = "tests/unit/cli/test_ask", "tests/unit/cli/test_serve"
TRACKING = "tests/unit/cli/test_tracking"
SIM = "tests/unit/cli/test_sim"
ELSEWHERE = {
    "polyreme run manifests/samples/quickstart.yaml --fresh --inject kill-rank=1@70": "make quickstart",
    "polyreme run in-stages.yaml": "test_e2e_stages",
    "polyreme run manifests/samples/prefer-words.yaml": "test_preference_run",
    "polyreme data ls": "tests/unit/cli/test_cli_commands",
    "polyreme runs rm NAME": "it asks; that of the page about own data, with --yes, is run here",
    "polyreme run job.yaml --nodes 5 --inject slow-node=1": "test_e2e_checked_nodes",
    "polyreme node --name left --name right --devices 2": "tests/cluster/test_how_to_kubernetes",
    "polyreme run job.yaml --set metadata.name=slow --set training.optimizer.learningRate=3e-4": OVERRIDES,
    "polyreme validate job.yaml --set 'data.sources[0].weight=2' --set training.steps=null --set training.epochs=3": (
        OVERRIDES
    ),
    "polyreme validate base.yaml mine.yaml --set training.steps=200 -o yaml": OVERRIDES,
    "polyreme run base.yaml mine.yaml": OVERRIDES,
    "polyreme sweep job.yaml --set training.optimizer.learningRate=1e-3,3e-4 --set training.seed=1,2": "test_sweep",
    "polyreme sweep job.yaml --set training.optimizer.learningRate=1e-3,3e-4 --dry-run -o yaml | kubectl create -f -": (
        "tests/unit/cli/test_sweep_jobs"
    ),
    "polyreme sweep job.yaml --set training.optimizer.learningRate=1e-3,3e-4 --set training.seed=1,2 --dry-run": (
        "tests/unit/cli/test_sweep_jobs"
    ),
    "polyreme runs show NAME": "tests/unit/cli/test_cli_commands",
    "polyreme runs logs NAME --stacks": "test_identical_losses_after_hangs",
    "polyreme runs compare slow fast": "tests/unit/cli/test_runs_compare",
    "polyreme runs compare slow fast -o json": "tests/unit/cli/test_runs_compare",
    'polyreme ask NAME --image page.png "Which digits, left to right?"': ASK,
    'polyreme ask quickstart --image page.png "Which digits, left to right?"': ASK,
    'polyreme ask ./model --image page.png "Which digits, left to right?"': ASK,
    "polyreme serve quickstart": SERVE,
    "polyreme serve ./model --host 0.0.0.0 --token-file token": SERVE,
    'polyreme checkpoint check-server ./further http://127.0.0.1:8000 --image page.png --question "Which digits?"': (
        "tests/unit/cli/test_check_server"
    ),
    "polyreme console": "tests/unit/console",
    "polyreme plan job.yaml --hardware a100-80g --slow-device l40s-48g": "tests/unit/cli/test_cli_plan",
    "polyreme sim --nodes 2048 --spares 0,16,64": SIM,
    "polyreme sim --fit NAME --spares 0,4": SIM,
    "polyreme sim --fit job.json --spares 0,4": SIM,
    "polyreme sim job.yaml --interval 300,600,1200 --durable 120 --page sim.html": SIM,
    "polyreme sweep manifests/samples/quickstart.yaml --set training.optimizer.learningRate=2e-3,5e-4 "
    "--set training.steps=120 --set 'data.schedule=[]'": "test_sweep",
    "polyreme runs export quickstart --tensorboard ./tensorboard": TRACKING,
    "polyreme runs export quickstart --mlflow http://127.0.0.1:5000 --experiment digits": TRACKING,
    "polyreme runs export quickstart --csv steps.csv": TRACKING,
    "polyreme run job.yaml --track tensorboard:./tensorboard --track mlflow:http://127.0.0.1:5000": "soak-tracking",
}
"""Commands that are not run here, and what runs them."""
SHELL = set("|&;<>$`*?~")
"""A command with one of these needs a shell."""
BIG_JOB = """
apiVersion: polyreme.dev/v1alpha1
kind: TrainingJob
metadata: {name: big}
spec:
  model: {preset: kimi-vl-a3b}
  data: {sequenceTokens: 4096, sources: [{name: one, dataset: sample/digits-1}]}
  training: {steps: 10, packsPerStep: 16}
  workers: {replicas: 1, devices: 8, deviceResource: nvidia.com/gpu, hardware: h200-141g}
"""
Call = Callable[[str], str]


def page_commands(name: str) -> list[str]:
    """Commands of a page that are run here, each once."""
    page = ROOT / name if name == "README.md" else HOW_TO / name
    own = (c for c in dict.fromkeys(commands(page)) if c.startswith("polyreme "))
    return [c for c in own if c not in ELSEWHERE and "s3://" not in c]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures, two files of records, a bad one, shards, tables, and the job of the page, of fewer steps."""
    folder = tmp_path / "newcomer"
    records = [*write_records(folder), record("r1", ["00.jpg"], "red"), record("bad", ["missing.png"], "red")]
    for name in ("shapes", "receipts"):
        write_jsonl(folder / f"{name}.jsonl", list(records))
    write_shards(folder / "shards", samples=40)
    write_parquet(folder / "hub/data/train-0.parquet", rows_of(0, 80))
    write_saved(folder / "saved", rows=40)
    shown = re.findall(r"^```yaml\n(.*?)^```$", (HOW_TO / "own-data.md").read_text(), re.DOTALL | re.MULTILINE)
    (job,) = [block for block in shown if "kind: TrainingJob" in block]
    assert "steps: 80" in job
    (folder / "job.yaml").write_text(job.replace("steps: 80", "steps: 4"))
    return folder


@pytest.fixture
def call(folder: Path) -> Call:
    """Type a command in the folder; it must succeed. Returns what it printed.

    One that starts no process and needs no shell is called in this process, which is faster.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")},
        "POLYREME_HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }

    def type_it(command: str) -> str:
        words = shlex.split(command)
        if words[0] == "polyreme" and words[1] not in STARTING and not SHELL & set(command):
            with contextlib.chdir(folder):
                ended = called_here(words[1:], environment)
            assert ended.code == 0, f"{command}\n{ended.output}{ended.said}"
            return ended.output
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return type_it


def test_the_pages_about_own_data_do_what_they_show(call: Call, folder: Path) -> None:
    every = page_commands("own-data.md")
    deletions = [command for command in every if " rm " in command]
    shown = {command: call(command) for command in every if command not in deletions}
    assert "1 record of shapes@1 could not be used: polyreme data show shapes@1" in shown["polyreme run job.yaml"]
    assert "bad " in shown["polyreme data show shapes"]
    assert "a000001-s00000004" in shown["polyreme checkpoint ls shapes"]
    assert "intact" in call("polyreme checkpoint verify shapes")
    assert "<mark>" in (folder / "shapes-step-3.html").read_text()
    for form in ("register shards", "register rows", "register saved"):
        (printed,) = [shown[command] for command in shown if form in command]
        assert "records  80\n" in printed
    for command in [*page_commands("README.md"), *deletions]:
        call(command.replace("NAME", "shapes"))


def test_the_page_about_layouts_does_what_it_shows(call: Call, folder: Path) -> None:
    of_hardware, of_images, of_own_devices, of_serving, profile, measured = page_commands("plan-a-layout.md")
    page = (HOW_TO / "plan-a-layout.md").read_text()
    (row,) = re.findall(r"^ +\$ cat mine.json\n +(.*)$", page, re.MULTILINE)
    (folder / "mine.json").write_text(row)
    call(profile)
    assert list((folder / "traces").iterdir())
    call(measured)
    (folder / "job.yaml").write_text(BIG_JOB)
    for command in (of_hardware, of_images, of_own_devices):
        assert "to keep this layout, add to the job's spec:" in call(command)
    below = page.partition(of_serving)[2].partition("\n\n")[0]
    shown = {line.strip() for line in below.strip().splitlines()} - {"..."}
    assert len(shown) > 5
    assert shown <= {line.strip() for line in call(of_serving).splitlines()}


def test_the_page_about_mixtures_prints_what_it_shows(call: Call, folder: Path) -> None:
    page = (HOW_TO / "mix-datasets.md").read_text()
    (job,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (folder / "mixed.yaml").write_text(job)
    train, show = page_commands("mix-datasets.md")
    call(train)
    printed = call(show).splitlines()
    assert printed == [line.removeprefix("    ") for line in page.splitlines() if line.strip() in printed]


def test_every_documented_command_is_run_here_or_elsewhere() -> None:
    pages = ("own-data.md", "README.md", "plan-a-layout.md", "mix-datasets.md")
    run_here = {command for page in pages for command in page_commands(page)}
    shown = {command for page in PAGES for command in commands(page) if command.startswith("polyreme ")}
    in_buckets = {command for command in shown if "s3://" in command or "$POLYREME_OBJECTS_URL" in command}
    of_a_run = {
        "polyreme checkpoint export run-7 --to ./model",
        "polyreme checkpoint average run-7 --last 3 --to ./mean",
    }
    # tests/unit/cli/test_data_commands runs the operation and the recipe of that page, and calls each of its verbs.
    of_operations = {*page_commands("data-operations.md")}
    assert shown - run_here - in_buckets - of_a_run - of_operations == set(ELSEWHERE)
