"""A wrong URL, wrong credentials, no such bucket or database, another schema: one sentence, a documented exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from polyreme.main import invoke
from polyreme_api.environment import DATABASE_URL, OBJECTS_URL
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.registry.engine import open_database
from tests.services.conftest import DATABASE_PASSWORD as SECRET

pytestmark = pytest.mark.services

JOB = """
apiVersion: polyreme.dev/v1alpha1
kind: TrainingJob
metadata: {name: wrong}
spec:
  model: {preset: kimi-vl-nano}
  data: {sequenceTokens: 96, seed: 3, sources: [{name: one, dataset: sample/digits-1}]}
  training: {steps: 1, packsPerStep: 1, seed: 1}
  parallelism: {mode: Auto}
  workers: {replicas: 1, devices: 1}
"""


def ended(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Call the command line on a home of its own; return its code and its one sentence, with no secret anywhere."""
    code = invoke(["--home", str(tmp_path / "home"), *arguments])
    said = capsys.readouterr()
    sentences = [line for line in said.err.splitlines() if line.startswith("polyreme: ")]
    assert len(sentences) == 1, said.err
    written = [path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert all(SECRET not in shown for shown in (said.err, said.out))
    assert all(SECRET.encode() not in data for data in written)
    return code, sentences[0]


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (("postgres@", "nobody@"), ExitCode.ENVIRONMENT, 'role "nobody" does not exist; change POLYREME_DATABASE_URL'),
        (("/test_", "/absent_"), ExitCode.ENVIRONMENT, "does not exist; change POLYREME_DATABASE_URL"),
        (("host=", "host=/nowhere"), ExitCode.ENVIRONMENT, "registry failed after 6 tries"),
        (("postgres@", f"postgres:{SECRET}@"), ExitCode.USAGE, "set PGPASSWORD; change POLYREME_DATABASE_URL"),
        (("+psycopg2", "+asyncpg"), ExitCode.USAGE, "no registry for"),
        (("postgresql+psycopg2", "mysql"), ExitCode.USAGE, "no registry for"),
    ],
)
def test_a_wrong_database_is_one_sentence_without_its_password(
    database: str,
    change: tuple[str, str],
    code: ExitCode,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DATABASE_URL, database.replace(*change))
    seen, said = ended(["data", "ls"], tmp_path, capsys)
    assert seen == code
    assert sentence in said


def test_a_schema_of_a_newer_release_is_one_sentence(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL, database)
    open_database(database).close()
    engine = create_engine(database)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    code, said = ended(["data", "ls"], tmp_path, capsys)
    assert code == ExitCode.ENVIRONMENT
    assert "registry was written by a newer release: schema 9999" in said


@pytest.mark.parametrize(
    ("url", "variables", "code", "sentence"),
    [
        ("s3://absent/prefix", {}, ExitCode.ENVIRONMENT, "the server has no such bucket"),
        ("{}", {"AWS_SECRET_ACCESS_KEY": SECRET}, ExitCode.ENVIRONMENT, "refuses the credentials or the access"),
        ("{}", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ExitCode.ENVIRONMENT, "failed at its listing after 4 tries"),
        (f"s3://me:{SECRET}@bucket/prefix", {}, ExitCode.USAGE, "an s3:// URL has credentials"),
        ("ftp://bucket/prefix", {}, ExitCode.USAGE, "expected file:///absolute/directory or s3://bucket/prefix"),
    ],
)
def test_a_wrong_object_store_is_one_sentence_and_the_run_has_not_begun(
    bucket: str,
    url: str,
    variables: dict[str, str],
    code: ExitCode,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OBJECTS_URL, url.format(bucket))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    seen, said = ended(["run", str(job)], tmp_path, capsys)
    assert seen == code
    assert sentence in said
    assert not list((tmp_path / "home").glob("runs/*/*/cluster.journal"))
