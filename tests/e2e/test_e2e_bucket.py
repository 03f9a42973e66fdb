"""A run on one machine whose checkpoints lie in a bucket of a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme.run_files.records import read_records_at
from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import small
from tools.s3.server import BucketServer

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.services]

REFUSED = 4


def test_a_run_saves_to_a_bucket_is_listed_verified_and_exported_from_it_and_writes_no_secret_down(
    home: PolyremeHome, bucket: str, bucket_server: BucketServer, tmp_path: Path
) -> None:
    here = PolyremeHome(home.path, outputs=tmp_path)  # with the variables that open the bucket
    checkpoint = {"everySteps": 2, "keep": 3, "location": bucket}
    job = here.write_job("bucket", **small("sample/digits-1", steps=5, checkpoint=checkpoint))
    serving = here.start(job)
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["checkpoints"] == bucket
    assert ended.item["step"] == 5
    for root in ("bucket", bucket):
        rows = here.call("checkpoint", "ls", root, "-o", "json").item
        assert [(row["step"], row["committed"], row["history"]) for row in rows] == [(n, True, True) for n in (2, 4, 5)]
    assert here.call("checkpoint", "verify", bucket).code == 0
    exported = here.call("checkpoint", "export", "bucket", "--to", str(tmp_path / "model"), "-o", "json")
    assert exported.code == 0, exported.said
    assert exported.item["checkpoint"] == "a000001-s00000005"
    assert [record.step for record in read_records_at(bucket).history] == [1, 2, 3, 4, 5]
    assert not serving.run.checkpoints.exists()

    begun_again = here.call("run", str(here.write_job("other", **small("sample/digits-1", checkpoint=checkpoint))))
    assert begun_again.code == REFUSED
    assert f"checkpoint root belongs to another run: {bucket} holds a000001-s00000002" in begun_again.said
    secret = bucket_server.environment["AWS_SECRET_ACCESS_KEY"].encode()
    written = [path for path in serving.run.path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert [path for path in written if secret in path.read_bytes()] == []
