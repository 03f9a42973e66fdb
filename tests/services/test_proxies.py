"""Clients of the object store obey the chart's `proxy`; what its NO_PROXY names is called directly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.errors import PolyremeError
from polyreme_datahub.lakehouse_admin import prepare_bucket
from polyreme_datahub.objects import open_store

pytestmark = pytest.mark.services
GOLDEN = Path(__file__).parents[1] / "golden/chart/openshift.yaml"
NOBODY = "http://127.0.0.1:9"
"""A proxy that refuses connections: a request that succeeds did not ask it."""


def rendered_no_proxy() -> str:
    for manifest in yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8")):
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == "polyreme-datahub":
            env = manifest["spec"]["template"]["spec"]["containers"][0]["env"]
            (found,) = (each["value"] for each in env if each["name"] == "NO_PROXY")
            return str(found)
    raise AssertionError(GOLDEN)


def clients(url: str) -> dict[str, Callable[[], Any]]:
    return {"obstore": lambda: list(open_store(url).list("")), "boto3": lambda: prepare_bucket(url)}


@pytest.mark.parametrize("client", ["obstore", "boto3"])
def test_a_server_is_called_by_the_proxy_unless_no_proxy_names_it(
    bucket: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, NOBODY)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PolyremeError):
        clients(bucket)[client]()
    monkeypatch.setenv("NO_PROXY", rendered_no_proxy())
    clients(bucket)[client]()
