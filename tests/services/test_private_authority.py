"""Servers whose certificates an authority of one's own signed, as the chart's `caBundle` names it to our processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.environment import DATABASE_URL, TOPICS_URL
from polyreme_api.errors import PolyremeError
from polyreme_datahub.lakehouse_admin import prepare_bucket
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.topics.open import open_topics
from polyreme_operator.reconcile.ca_bundle import FILE_VARIABLES
from tests.private_authority import issue
from tools.cluster.servers import LOOPBACK
from tools.s3.server import Buckets
from tools.services.guard import held
from tools.services.postgresql import Postgresql
from tools.services.pulsar import Pulsar

pytestmark = [pytest.mark.services, pytest.mark.slow]
GOLDEN = Path(__file__).parents[1] / "golden/chart/ipv6.yaml"
BUCKET = "polyreme"
MOUNTED = "/etc/polyreme/ca/ca.crt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """Servers that run, and the authority of their certificates."""

    variables: Mapping[str, str]
    authority: Path

    def use(self) -> dict[str, Callable[[], Any]]:
        """How our processes use each of them, by the client's name."""
        url = f"s3://{BUCKET}/tried"
        return {
            "psycopg2": lambda: open_database(self.variables[DATABASE_URL]).close(),
            "obstore": lambda: list(open_store(url).list("")),
            "boto3": lambda: prepare_bucket(url),
            "pulsar": self._look_up,
        }

    def _look_up(self) -> None:
        with contextlib.closing(open_topics(self.variables[TOPICS_URL])) as topics:
            topics.check()


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trusted]:
    """PostgreSQL, Pulsar and S3, each with TLS."""
    folder = tmp_path_factory.mktemp("trusted")
    authority, certificate = issue(folder / "certificates", LOOPBACK)
    with held(folder / "servers") as servers:
        place = folder / "servers"
        started = (
            Pulsar(place, servers, host=LOOPBACK, certificate=certificate),
            Buckets(place / "buckets", servers, (BUCKET,), certificate=certificate),
            Postgresql(place, servers, host=LOOPBACK, certificate=certificate),
        )
        for server in started:
            server.start()
        variables = {name: value for server in started for name, value in server.wait().items()}
        yield Trusted(variables=variables, authority=authority)


@pytest.fixture
def environment(trusted: Trusted, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables of the servers, and no authority."""
    for name in (*rendered("polyreme-datahub"), "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in trusted.variables.items():
        monkeypatch.setenv(name, value)
    return trusted.variables


def rendered(deployment: str) -> list[str]:
    """Variables by which the chart names the mounted file to a Deployment's containers."""
    for manifest in yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8")):
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == deployment:
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            return [each["name"] for each in container["env"] if each.get("value") == MOUNTED]
    raise AssertionError(deployment)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("client", ["psycopg2", "obstore", "boto3", "pulsar"])
def test_each_client_trusts_the_authorities_of_the_charts_variables(
    trusted: Trusted, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolyremeError) as caught:
        trusted.use()[client]()
    assert any(word in str(caught.value) for word in ("certificate", "POLYREME_TOPICS_CA_FILE")), caught.value
    for name in rendered("polyreme-datahub"):
        monkeypatch.setenv(name, str(trusted.authority))
    trusted.use()[client]()


@pytest.mark.usefixtures("environment")
def test_the_variables_of_a_jobs_workers_are_enough_for_its_objects(
    trusted: Trusted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered("polyreme-datahub") == rendered("polyreme-datahub-workers")
    assert set(FILE_VARIABLES) < set(rendered("polyreme-datahub"))
    for name in FILE_VARIABLES:
        monkeypatch.setenv(name, str(trusted.authority))
    for client in ("obstore", "boto3"):
        trusted.use()[client]()
