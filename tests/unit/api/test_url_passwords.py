"""A password inside a URL is found wherever drivers would read it, and nothing else is taken for one."""

import pytest

from polyreme_api.url_passwords import has_password


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
