"""PostgreSQL, Pulsar and S3 outside of the cluster, as its pods reach them: by address, with passwords and a token.

Each speaks TLS, with a certificate of an authority that no client knows. PostgreSQL and Pulsar also serve clients
without TLS, such as those of the previous version, and so does a second S3 server over the same folder.
"""

import base64
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.nodes.cluster import Cluster, Manifest
from tests.nodes.release import JOBS, SYSTEM
from tests.private_authority import issue
from tools.cluster.servers import Servers
from tools.s3.server import Buckets
from tools.services.guard import held
from tools.services.postgresql import Postgresql
from tools.services.pulsar import Pulsar
from tools.services.services import BUCKET

DATABASE, TOPICS, OBJECTS = "polyreme-database", "polyreme-topics", "polyreme-object-store"
SECRETS = {
    DATABASE: ("PGUSER", "PGPASSWORD"),
    TOPICS: ("POLYREME_TOPICS_TOKEN",),
    OBJECTS: ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
}
SECRET_VARIABLES = ("PGPASSWORD", "POLYREME_TOPICS_TOKEN", "AWS_SECRET_ACCESS_KEY")
"""Variables whose values may be found nowhere but in Secrets."""


class Outside:
    """The three servers, while they run.

    Args:
        folder: Folder of their data.
        servers: Those of the folder.
        host: Address that they listen on.
    """

    def __init__(self, folder: Path, servers: Servers, host: str) -> None:
        self.folder, self._servers = folder, servers
        authority, certificate = issue(folder / "certificates", host)
        self._authority = authority.read_text()
        plain = Buckets(folder / "buckets", servers, (BUCKET,), host=host)
        plain.start()
        untrusting = plain.wait()
        secret = untrusting["AWS_SECRET_ACCESS_KEY"]
        self._pulsar = Pulsar(folder, servers, host=host, certificate=certificate)
        encrypted = (
            self._pulsar,
            Buckets(folder / "buckets", servers, (BUCKET,), host=host, certificate=certificate, secret=secret),
            Postgresql(folder, servers, host=host, certificate=certificate),
        )
        for server in encrypted:
            server.start()
        self._encrypted = {name: value for server in encrypted for name, value in server.wait().items()}
        database = self._encrypted["POLYREME_DATABASE_URL"].partition("?")[0]
        addresses = {"POLYREME_DATABASE_URL": database, "POLYREME_TOPICS_URL": self._pulsar.plain_url}
        self.variables = {**self._encrypted, **untrusting, **addresses}
        """Credentials, and how those find the servers who do not know the authority."""

    def kill_broker(self) -> None:
        """Kill the broker, and start it again with what it had."""
        broker = self._servers.named("pulsar")
        assert broker is not None
        self._servers.kill(broker)
        self._pulsar.start()
        self._pulsar.wait()

    def values(self) -> dict[str, Any]:
        """Values of the chart: every connection is encrypted, and each server's certificate checked."""
        return {**_values(self._encrypted), "caBundle": {"pem": self._authority}, "queues": {"default": "Unlimited"}}

    def plain_values(self) -> dict[str, Any]:
        """Values of a chart that has no caBundle."""
        return _values(self.variables)

    def secrets(self) -> list[Manifest]:
        """Secrets that the values name; workers read the one of the object store."""
        return [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace},
                "data": {key: base64.b64encode(self.variables[key].encode()).decode() for key in keys},
            }
            for name, keys in SECRETS.items()
            for namespace in ((SYSTEM, JOBS) if name == OBJECTS else (SYSTEM,))
        ]


def _values(variables: Mapping[str, str]) -> dict[str, Any]:
    return {
        "profile": "production",
        "database": {"url": variables["POLYREME_DATABASE_URL"], "existingSecret": DATABASE},
        "topics": {"url": variables["POLYREME_TOPICS_URL"], "existingSecret": TOPICS},
        "objectStore": {
            "url": f"s3://{BUCKET}",
            "endpoint": variables["AWS_ENDPOINT_URL"],
            "region": variables["AWS_REGION"],
            "existingSecret": OBJECTS,
        },
    }


@contextlib.contextmanager
def outside(cluster: Cluster, folder: Path) -> Iterator[Outside]:
    """Run the servers until the block ends."""
    with held(folder) as servers:
        yield Outside(folder, servers, cluster.gateway)
