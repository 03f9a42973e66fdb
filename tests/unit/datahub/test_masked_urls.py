"""No message shows a password, however badly the URL that holds it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub import hub
from polyreme_datahub.objects import check_access
from polyreme_datahub.registry.engine import open_database

SECRET = "hush-hush"
DATABASES = [
    f"postgresql+asyncpg://me:{SECRET}@host/db",
    f"postgresql://me:{SECRET}@host:port/db",
    f"postgres://me:{SECRET}@host/db",
    f"mysql://me:{SECRET}@host/db",
    f"me:{SECRET}@host",
    f"postgresql+pg8000:///db?user=me&password={SECRET}",
    f"://a@b:{SECRET}@host",
    f"postgresql+psycopg2://me:{SECRET}@host/db",
    f"postgresql+psycopg2://me:a/{SECRET}@host/db",
    f"postgresql+psycopg2://host/db?user=me&password={SECRET}",
    f"postgresql+psycopg2:///db?host=/run&password={SECRET}",
]
OBJECTS = [
    f"s3://me:{SECRET}@bucket/prefix",
    f"gs://me:{SECRET}@bucket",
    f"http://me:a/{SECRET}@host/bucket",
    f"s3://bucket/prefix?secret={SECRET}",
    f"file://me:{SECRET}@host/folder",
]


@pytest.mark.parametrize("url", DATABASES)
def test_a_database_url_of_no_use_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(PolyremeError) as refused:
        open_database(url)
    assert refused.value.exit_code is ExitCode.USAGE
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", OBJECTS)
def test_an_objects_url_of_no_use_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    for call in (check_access, lambda given: hub.register(f"sqlite:///{tmp_path}/r.sqlite", given, "one", {})):
        with pytest.raises(PolyremeError) as refused:
            call(url)
        assert refused.value.exit_code is ExitCode.USAGE
        assert SECRET not in str(refused.value)
