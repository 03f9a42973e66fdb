"""A home that an older version left is read whole: runs, checkpoints, datasets and packs, the exported model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme.job_files import read_job
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme_api.job import parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.labels import KIND_JOB
from polyreme_cluster.port import ObjectRef
from polyreme_datahub import hub
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import plan_key
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader import job_packs
from polyreme_datahub.objects import open_store as open_objects
from polyreme_local.api_server.journal import open_store
from polyreme_local.api_server.journal_file import read_journal
from polyreme_local.api_server.store import Store
from polyreme_planner.plan import plan_for
from polyreme_system.files import read_json
from polyreme_trainer.export.names import to_checkpoint
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.slices import Place, Rows
from tests.contract.adapters import ManualClock, uids
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home, read_values
from tests.kept.reading import dataset_values, export_tensors, run_values, tensor_values

MODULE = re.compile(rb"\bpolyreme(?:_[a-z]+)?(?:\.[a-z_]+)+")
NO_MODULES = (b"polyreme.dev",)
STORED_COMMAND = b"polyreme.launcher"
"""``python -m polyreme.launcher`` is the command of stored pods, the one module that files name; it still runs."""
SET_BYTES_MAX = 3 * 2**19
Call = Callable[..., Any]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)]


@pytest.fixture
def home(version: Path, tmp_path: Path) -> Path:
    return copy_home(version, tmp_path)


@pytest.fixture
def call(home: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a command on the home; returns its data."""

    def on_home(*arguments: str) -> Any:
        capsys.readouterr()
        code = invoke(["--home", str(home), *arguments, "-o", "json"])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        value = json.loads(shown.out)
        return value["item"] if "item" in value else value["items"]

    return on_home


def test_both_runs_are_listed_and_shown(version: Path, call: Call) -> None:
    runs = read_values(version)["runs"]
    rows = {row["name"]: row for row in call("runs", "ls")}
    assert {name: (row["state"], row["attempt"]) for name, row in rows.items()} == {
        FINISHED: ("Succeeded", 1),
        STOPPED: ("Stopped", 2),
    }
    for name, row in rows.items():
        steps = sorted(map(int, runs[name]["history"]))
        assert row["step"] == steps[-1]
        shown = call("runs", "show", name)
        points = [(entry["attempt"], entry["resumedFrom"]) for entry in shown["attempts"]]
        assert points == [(point["attempt"], point["resumeFrom"]) for point in runs[name]["attempts"]]
        assert [entry["step"] for entry in call("runs", "logs", name, "--steps")] == steps


def test_every_checkpoint_is_sound(version: Path, call: Call) -> None:
    for name, values in read_values(version)["runs"].items():
        listed = {row["name"]: row for row in call("checkpoint", "ls", name)}
        assert listed.keys() == values["tensors"].keys()
        assert all(row["committed"] and row["history"] for row in listed.values())
        for checkpoint in listed:
            verified = call("checkpoint", "verify", name, "--checkpoint", checkpoint)
            assert verified["verdict"].startswith("intact")


@pytest.mark.parametrize("run", [STOPPED, FINISHED])
def test_records_tensors_and_packs_have_the_values_of_then(version: Path, home: Path, run: str) -> None:
    """Packs once the data was processed again, as the command of the run does by itself."""
    place = Home(path=home)
    spec = read_job(place.run("default", run).job_file).spec
    uid = str((read_json(place.run("default", run).data_report) or {})["job"])
    with pytest.raises(IndexDamagedError, match="index has format 2, this version reads 4: process the job's data"):
        job_packs.open_source(place.objects_url, spec, job=uid, wait_s=0.0)
    before = stored_plan(place, uid, spec)
    hub.process(spec, registry_url=place.registry_url, objects_url=place.objects_url, job=uid)
    after = stored_plan(place, uid, spec)
    assert after["identities"] == before["manifests"] != after["manifests"], "loader states name the indexes of then"
    assert run_values(home, run) == read_values(version)["runs"][run]


def stored_plan(place: Home, job: str, spec: TrainingJobSpec) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(open_objects(place.objects_url).get(plan_key(job, plan_data(spec))))
    return plan


def test_the_registry_lists_the_datasets(version: Path, home: Path, call: Call) -> None:
    wanted = read_values(version)["datasets"]
    assert dataset_values(home) == wanted
    assert {row["name"]: row["records"] for row in call("data", "ls") if row["name"] in wanted} == {
        name: values["records"] for name, values in wanted.items()
    }


def test_records_of_then_are_not_read_again_and_newer_operations_run_once(home: Path) -> None:
    place = Home(path=home)
    job = read_job(place.run("default", STOPPED).job_file)

    def process() -> dict[str, tuple[bool, bool]]:
        report = hub.process(job.spec, registry_url=place.registry_url, objects_url=place.objects_url, job="again")
        return {count.operation: (count.misses > 0, count.hits > 0) for count in report.operations}

    made, reused = (True, False), (False, True)
    assert process() == dict.fromkeys(["decode", "compose", "tokenize", "index"], made) | {"ingest": reused}
    assert set(process().values()) == {reused}


@pytest.mark.parametrize("run", [STOPPED, FINISHED])
async def test_the_journal_is_replayed(version: Path, home: Path, run: str) -> None:
    path = Home(path=home).run("default", run).journal_file
    content = read_journal(path)
    assert (content.damaged_lines, content.torn_bytes) == (0, 0)
    async with open_store(path, clock=ManualClock(), run_token="t", new_uid=uids()) as (store, _):
        job = parse_job(_job(store, run))
        values = read_values(version)["runs"][run]
        assert job.status.attempt is not None
        assert job.status.attempt.number == len(values["attempts"])
        assert job.status.attempt.plan_hash == plan_for(job.spec).hash
        assert job.status.step == max(map(int, values["history"]))
        assert job.status.restarts == len(values["attempts"]) - 1
        assert job.status.is_true("Succeeded" if run == FINISHED else "Suspended")


def _job(store: Store, name: str) -> Any:
    return store.get(ObjectRef(kind=KIND_JOB, namespace="default", name=name))


def test_an_exported_model_is_loaded(version: Path, home: Path) -> None:
    export = version / "export"
    assert export_tensors(export) == read_values(version)["export"]
    shape = plan_for(read_job(Home(path=home).run("default", FINISHED).job_file).spec).shape
    loaded = build_model(shape, seed=0, media_token=1).state_dict()
    catalogue = read_catalogue(export)
    place = Place(experts=range(shape.decoder.experts))
    load_weights(Rows.whole(loaded), catalogue, check_fit(catalogue, shape), place)
    assert tensor_values(to_checkpoint(loaded)) == read_values(version)["export"]


def test_a_version_is_small(version: Path) -> None:
    assert sum(path.stat().st_size for path in version.rglob("*") if path.is_file()) < SET_BYTES_MAX


def test_no_file_names_a_module(version: Path) -> None:
    found = {
        (path.name, name)
        for path in version.rglob("*")
        if path.is_file() and path.parent.name != "crds"
        for name in MODULE.findall(path.read_bytes())
        if not name.startswith(NO_MODULES)
    }
    assert found == {("cluster.journal", STORED_COMMAND), ("cluster.json", STORED_COMMAND)}
