"""Access of clients to a cluster: address, certificate, tokens."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme_system.files import read_json
from tools.cluster.servers import dump


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a client needs to speak with the API server."""

    url: str
    keys: Path
    """Folder of the certificates."""
    tokens: Mapping[str, str]
    """Token by user name."""

    def record(self) -> dict[str, Any]:
        """Return what ``read`` reads."""
        return {"url": self.url, "keys": str(self.keys), "tokens": dict(self.tokens)}

    @classmethod
    def read(cls, path: Path) -> "Access":
        """Read what was recorded of a cluster that is up."""
        found = read_json(path)
        assert found is not None, path
        return cls(url=found["url"], keys=Path(found["keys"]), tokens=found["tokens"])

    def write_kubeconfig(self, path: Path, *, user: str) -> Path:
        """Write the kubeconfig of a user."""
        authority = base64.b64encode((self.keys / "server.crt").read_bytes()).decode()
        cluster = {"server": self.url, "certificate-authority-data": authority}
        context = {"cluster": "polyreme-test", "user": user}
        return dump(
            path,
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "polyreme-test",
                "clusters": [{"name": "polyreme-test", "cluster": cluster}],
                "users": [{"name": user, "user": {"token": self.tokens[user]}}],
                "contexts": [{"name": "polyreme-test", "context": context}],
            },
        )
