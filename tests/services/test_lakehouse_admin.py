"""A bucket's administration on a real S3 server; the lifecycle rule, which that server lacks, by boto3's own model."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.stub import Stubber

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import ObjectNotFoundError, StoreFailedError
from polyreme_datahub import hub, lakehouse_admin
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.lakehouse_admin import abort_unfinished_uploads, prepare_bucket, presigned_link
from polyreme_datahub.objects import check_access, open_store
from tools.s3.server import BucketServer

pytestmark = pytest.mark.services


def fetched(link: str) -> bytes:
    with urllib.request.urlopen(link, timeout=10) as answer:
        body: bytes = answer.read()
        return body


def test_a_bucket_is_created_once_and_can_then_be_used(bucket: str) -> None:
    url = f"s3://new-{urlsplit(bucket).path.strip('/').replace('_', '-')}/objects"
    with pytest.raises(StoreFailedError, match="no such bucket"):
        check_access(url)
    assert prepare_bucket(url).created
    assert not prepare_bucket(url).created
    check_access(url)
    open_store(url).put("a", b"1")


def test_a_link_reads_one_object_without_credentials_until_it_ends(bucket: str, bucket_server: BucketServer) -> None:
    digest = Lakehouse(open_store(bucket)).put_blob(b"content")
    link = hub.link(bucket, digest, seconds=60)
    assert fetched(link) == b"content"
    assert bucket_server.environment["AWS_SECRET_ACCESS_KEY"] not in link
    for broken in (link.replace("X-Amz-Expires=60", "X-Amz-Expires=600"), link.partition("?")[0]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(broken)
        assert refused.value.code == 403
        refused.value.close()


@pytest.mark.parametrize("seconds", [0, -1, 7 * 24 * 3600 + 1])
def test_a_link_that_can_not_be_given_is_refused(bucket: str, seconds: int) -> None:
    with pytest.raises(InvalidConfigError, match="expected 1 to 604800"):
        presigned_link(bucket, "a", seconds=seconds)
    with pytest.raises(InvalidConfigError, match="only a bucket's server gives links"):
        presigned_link("file:///folder", "a", seconds=1)
    with pytest.raises(ObjectNotFoundError, match="no object at absent"):
        presigned_link(bucket, "absent", seconds=1)


def test_wrong_credentials_and_a_server_away_are_named_without_the_secret(
    bucket: str, bucket_server: BucketServer
) -> None:
    wrong = {**bucket_server.environment, "AWS_SECRET_ACCESS_KEY": "hush-hush"}
    with pytest.raises(StoreFailedError, match="refused: 403") as refused:
        prepare_bucket(bucket, environment=wrong)
    assert "hush-hush" not in str(refused.value)
    away = {**bucket_server.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    with pytest.raises(StoreFailedError, match="can't be reached"):
        prepare_bucket(bucket, environment=away)


def test_unfinished_uploads_are_aborted_once_they_are_old(bucket: str, bucket_server: BucketServer) -> None:
    name, prefix = urlsplit(bucket).netloc, urlsplit(bucket).path.strip("/")
    with closing(lakehouse_admin._client(bucket_server.environment)) as client:
        for key in (f"{prefix}/mine", "elsewhere/other"):
            client.create_multipart_upload(Bucket=name, Key=key)
        began_s = client.list_multipart_uploads(Bucket=name)["Uploads"][0]["Initiated"].timestamp()
        assert abort_unfinished_uploads(bucket, age_s=3600.0, now_s=began_s + 1800) == 0
        assert abort_unfinished_uploads(bucket, age_s=3600.0, now_s=began_s + 7200) == 1
        assert [left["Key"] for left in client.list_multipart_uploads(Bucket=name)["Uploads"]] == ["elsewhere/other"]


def test_the_lifecycle_rule_is_added_beside_those_of_others_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "x"}, "Expiration": {"Days": 3}}
    ours = {
        "ID": "polyreme-abort-unfinished-uploads-a-b",
        "Status": "Enabled",
        "Filter": {"Prefix": "a/b/"},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
    }
    client: Any = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(lakehouse_admin, "_client", lambda _: client)
    with Stubber(client) as server:
        for known in ([other], [other, ours]):
            server.add_response("head_bucket", {}, {"Bucket": "bucket"})
            server.add_response("get_bucket_lifecycle_configuration", {"Rules": known}, {"Bucket": "bucket"})
            sent = {"Bucket": "bucket", "LifecycleConfiguration": {"Rules": [other, ours]}}
            server.add_response("put_bucket_lifecycle_configuration", {}, sent)
            assert prepare_bucket("s3://bucket/a/b").lifecycle
