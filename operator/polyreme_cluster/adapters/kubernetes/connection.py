"""API server and identity of a client: kubeconfigs and service accounts, as the ``kubernetes`` library loads them."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polyreme_api.errors import InvalidConfigError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

TOKEN_FRESH_S = 10.0
"""How long a token is used before its source is asked again; the kubelet rotates a pod's token ahead of its end."""


class Connection:
    """Address and credentials of one API server.

    Args:
        url: Root of the API.
        tls: How to verify the server, with our client certificate if we have one; None for plain HTTP.
        authorization: Returns the value of the Authorization header, or None; may block (a file, a credential plugin).
        server_hostname: Name in the server's certificate, where it is not the URL's.
        proxy: Proxy that the kubeconfig names.
    """

    def __init__(
        self,
        *,
        url: str,
        tls: ssl.SSLContext | None,
        authorization: Callable[[], str | None],
        server_hostname: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.tls = tls
        self.server_hostname = server_hostname
        self.proxy = proxy
        self._authorization = authorization
        self._known: str | None = None
        self._known_until_s = float("-inf")

    async def headers(self) -> dict[str, str]:
        """Return the headers that prove who we are."""
        if time.monotonic() >= self._known_until_s:
            self._known = await asyncio.to_thread(self._authorization)
            self._known_until_s = time.monotonic() + TOKEN_FRESH_S
        return {} if self._known is None else {"Authorization": self._known}

    def with_token(self, token: str) -> Connection:
        """Return a connection to the same server with another token; certificates of this client go with it."""
        return Connection(
            url=self.url,
            tls=self.tls,
            authorization=lambda: f"Bearer {token}",
            server_hostname=self.server_hostname,
            proxy=self.proxy,
        )

    def forget_token(self) -> None:
        """Ask the token's source again next time: the server refused what it gave."""
        self._known_until_s = float("-inf")


def from_kubeconfig(path: Path | str | None = None, *, context: str | None = None) -> Connection:
    """Read a kubeconfig; None is KUBECONFIG's, or the user's default.

    Raises:
        InvalidConfigError: If there is none, or it is broken.
    """
    from kubernetes.config import load_kube_config

    return _connection(
        lambda configuration: load_kube_config(
            config_file=None if path is None else str(path), context=context, client_configuration=configuration
        ),
        what=f"kubeconfig {path or 'of KUBECONFIG or ~/.kube/config'}",
    )


def from_service_account() -> Connection:
    """Take the service account of the pod that this process runs in.

    Raises:
        InvalidConfigError: If this is no pod.
    """
    from kubernetes.config import load_incluster_config

    return _connection(
        lambda configuration: load_incluster_config(client_configuration=configuration), what="service account"
    )


def from_pod_environment(authority: Path, environment: Mapping[str, str]) -> Connection:
    """Find the API server of the pod that this process runs in, without an account: calls need a token of their own.

    Args:
        authority: File with the certificate of the cluster's authority.
        environment: Of the process.

    Raises:
        InvalidConfigError: If this is no pod, or there is no such file.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port.isdigit():
        raise InvalidConfigError(
            f"no API server: KUBERNETES_SERVICE_HOST is {host!r}, KUBERNETES_SERVICE_PORT {port!r}, as in no pod"
        )
    try:
        tls = ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise InvalidConfigError(f"certificate of the cluster can't be read: {authority}: {error}") from error
    named = f"[{host}]" if ":" in host else host
    return Connection(url=f"https://{named}:{port}", tls=tls, authorization=lambda: None)


def _connection(load: Callable[[Configuration], None], *, what: str) -> Connection:
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException

    configuration = Configuration()
    # The library takes proxies from the environment here; ours come from the kubeconfig alone.
    configuration.proxy = None
    try:
        load(configuration)
        tls = _tls(configuration) if str(configuration.host).startswith("https") else None
    except (ConfigException, OSError, ValueError) as error:
        raise InvalidConfigError(f"{what} can't be used: {error}", field="KUBECONFIG") from error

    def authorization() -> str | None:
        key: str | None = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return key

    return Connection(
        url=str(configuration.host),
        tls=tls,
        authorization=authorization,
        server_hostname=configuration.tls_server_name,
        proxy=configuration.proxy,
    )


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        # The kubeconfig says insecure-skip-tls-verify.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
