"""The quickstart's job on a real PostgreSQL, Pulsar and S3 server gives the losses of the embedded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.run_files.records import read_records_at
from polyreme_api.environment import DATABASE_URL, OBJECTS_URL, TOPICS_URL
from polyreme_datahub.objects import open_store
from tests.e2e.polyreme_home import PolyremeHome
from tests.services.conftest import DATABASE_PASSWORD
from tools.s3.server import BucketServer

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.parallel]

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
STEPS = 6


def shortened(name: str, folder: Path, **spec: Any) -> Path:
    """Write the quickstart's job with fewer steps and one of its four sources."""
    job = yaml.safe_load(SAMPLE.read_text())
    job["metadata"]["name"] = name
    job["spec"]["training"]["steps"] = STEPS
    job["spec"]["training"]["optimizer"]["warmupSteps"] = STEPS // 2
    job["spec"]["data"] |= {"sources": job["spec"]["data"]["sources"][:1], "schedule": []}
    sets = job["spec"]["evaluation"]["sets"][:1]
    job["spec"]["evaluation"] = {**job["spec"]["evaluation"], "sets": sets, "samplesMax": 8, "answerTokensMax": 2}
    job["spec"]["checkpoint"]["everySteps"] = STEPS // 2
    job["spec"] |= {key: {**job["spec"].get(key, {}), **value} for key, value in spec.items()}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_run_on_the_three_servers_has_the_losses_of_an_embedded_one_and_reads_no_shared_folder(
    database: str, pulsar_server: str, bucket: str, bucket_server: BucketServer, tmp_path: Path
) -> None:
    embedded = PolyremeHome(tmp_path / "embedded")
    embedded.path.mkdir()
    here = embedded.start(shortened("here", tmp_path))
    variables = {DATABASE_URL: database, TOPICS_URL: pulsar_server, OBJECTS_URL: f"{bucket}/objects"}
    servers = PolyremeHome(tmp_path / "servers", variables=variables)
    servers.path.mkdir()
    serving = servers.start(shortened("there", tmp_path, checkpoint={"location": f"{bucket}/checkpoints"}))
    for ended in (here.end(), serving.end()):
        assert ended.code == 0, ended.said
    losses = embedded.losses("here")
    assert list(losses) == list(range(1, STEPS + 1))
    history = read_records_at(f"{bucket}/checkpoints").history
    assert {record.step: record.loss.hex() for record in history} == losses

    assert not (servers.path / "data").exists()
    assert not (servers.path / "checkpoints").exists()
    assert any(open_store(f"{bucket}/objects").list("plans/"))
    shown = servers.call("data", "show", "sample/digits-1", "-o", "json")
    assert shown.item["samples"] == 1500, shown.said
    assert b"data:image/png;base64" in (serving.run.report / "report.html").read_bytes()
    exported = servers.call("checkpoint", "export", "there", "--to", str(tmp_path / "model"))
    assert exported.code == 0, exported.said

    secrets = [DATABASE_PASSWORD.encode(), bucket_server.environment["AWS_SECRET_ACCESS_KEY"].encode()]
    written = [path for path in servers.path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written for secret in secrets if secret in path.read_bytes()] == []
