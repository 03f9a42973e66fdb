"""A password inside a URL is found wherever drivers would read it, and nothing else counts as one."""

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.urls import folder_path, has_password, is_bucket, is_folder


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+psycopg2://me:secret@db:5432/polyreme",
        "postgresql://me:se/cr?et@db/polyreme",
        "postgresql://:secret@db/polyreme",
        "postgresql:///polyreme?host=/run&password=secret",
        "https://me:secret@proxy:3128",
        "pulsar://broker:6650?token=secret",
        "before s3://key:secret@bucket/prefix",
    ],
)
def test_a_password_is_found(text: str) -> None:
    assert has_password(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "postgresql+psycopg2://db:5432/polyreme",
        "postgresql+psycopg2://me@db:5432/polyreme",
        "postgresql+psycopg2:///polyreme?user=postgres&host=/run/user",
        "pulsar://[::1]:6650/public/default",
        "https://host:8080/path@version",
        "s3://bucket/prefix",
        "file:///var/lib/a:b@c",
        "https://host/?passwords=many",
    ],
)
def test_other_urls_hold_none(text: str) -> None:
    assert not has_password(text)


@pytest.mark.parametrize(
    ("url", "bucket", "folder"),
    [
        ("s3://bucket/prefix", True, False),
        ("S3://bucket", True, False),
        ("file:///srv/a", False, True),
        ("/srv/s3:/a", False, False),
        ("http://[", False, False),
    ],
)
def test_the_scheme_says_whether_it_is_a_bucket_or_a_folder(url: str, bucket: bool, folder: bool) -> None:
    assert (is_bucket(url), is_folder(url)) == (bucket, folder)


@pytest.mark.parametrize(
    ("url", "path"),
    [("file:///srv/a", "/srv/a"), ("file://localhost/srv/a%20b", "/srv/a b"), ("FILE:///srv/a#1", "/srv/a#1")],
)
def test_the_path_of_a_folder(url: str, path: str) -> None:
    assert folder_path(url, field="f") == path


@pytest.mark.parametrize("url", ["/srv/a", "file://host/a", "file:///", "file:a", "s3://bucket/a", ""])
def test_another_url_than_a_folders_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfigError, match="not a local folder") as refused:
        folder_path(url, field="spec.export.location")
    assert refused.value.field == "spec.export.location"
