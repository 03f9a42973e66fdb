"""Which hosts and ports a URL of the registry names."""

import pytest
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2
from sqlalchemy.engine import make_url

from polyreme_datahub.registry.engine import with_hosts_apart


@pytest.mark.parametrize(
    ("query", "hosts", "ports"),
    [
        ("host=a:5433,b", "a,b", "5433,"),
        ("host=a:5433,b:5434", "a,b", "5433,5434"),
        ("host=a:5433&host=b", "a,b", "5433,"),
        ("host=a,b&port=5433,5434", "a,b", "5433,5434"),
        ("host=fd00::1,fd00::2", "fd00::1,fd00::2", ","),
        ("host=/var/run", "/var/run", None),
    ],
)
def test_each_host_of_a_list_has_its_own_port(query: str, hosts: str, ports: str | None) -> None:
    url = with_hosts_apart(make_url(f"postgresql+psycopg2:///polyreme?{query}"))
    _, arguments = PGDialect_psycopg2().create_connect_args(url)
    assert arguments["host"] == hosts
    assert arguments.get("port") == ports
