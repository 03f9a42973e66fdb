"""Topics by URL: in this process (``memory:``) or on Pulsar (``pulsar://host:port/tenant/namespace``).

Credentials come from the environment and stand in no URL: ``POLYREME_TOPICS_TOKEN``, or ``POLYREME_TOPICS_TOKEN_FILE``,
which is read again for each connection.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from polyreme_api.errors import InvalidConfigError
from polyreme_api.urls import masked
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Topics

URL = "POLYREME_TOPICS_URL"
TOKEN = "POLYREME_TOPICS_TOKEN"
TOKEN_FILE = "POLYREME_TOPICS_TOKEN_FILE"
AUTHORITIES_FILE = "POLYREME_TOPICS_CA_FILE"
"""Variable that names the certificates of the authorities that signed the broker's."""
MEMORY = "memory:"
NAMESPACE = "public/default"
SCHEMES = ("pulsar", "pulsar+ssl")
TOKEN_BYTES_MAX = 16384


def open_topics(url: str, *, environment: Mapping[str, str] = os.environ) -> Topics:
    """Open the bus at ``url``: ``memory:``, ``pulsar://host:port[/tenant/namespace]`` or the same by ``pulsar+ssl``.

    Nothing is connected before the first use.

    Raises:
        InvalidConfigError: If the URL is none of these, or holds credentials.
    """
    if url == MEMORY:
        return InProcessTopics()
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise InvalidConfigError(f"the URL of the topics has credentials; remove them and set {TOKEN}", field=URL)
    namespace = parts.path.strip("/") or NAMESPACE
    if parts.netloc.startswith("["):
        raise InvalidConfigError(
            f"not topics: {masked(url)!r}: Pulsar's client takes no IPv6 address; name a host", field=URL
        )
    fits = re.fullmatch(r"[\w.-]+:\d{1,5}", parts.netloc) and re.fullmatch(r"[\w.=:-]+/[\w.=:-]+", namespace)
    if parts.scheme not in SCHEMES or not fits or parts.query or parts.fragment:
        raise InvalidConfigError(
            f"not topics: {masked(url)!r}, expected {MEMORY} or pulsar://host:port[/tenant/namespace] (or pulsar+ssl)",
            field=URL,
        )
    # Imported here, since it is the only part that needs the client library.
    from polyreme_datahub.topics.pulsar import PulsarSettings, PulsarTopics

    return PulsarTopics(
        PulsarSettings(
            url=f"{parts.scheme}://{parts.netloc}",
            namespace=namespace,
            token=_token(environment),
            authorities=environment.get(AUTHORITIES_FILE) or None,
        )
    )


def _token(environment: Mapping[str, str]) -> Callable[[], str] | None:
    """Return what gives the token of a connection, if one is set.

    Raises:
        InvalidConfigError: If two are set, or the file can't be read.
    """
    token, file = environment.get(TOKEN), environment.get(TOKEN_FILE)
    if token and file:
        raise InvalidConfigError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one", field=TOKEN)
    if token:
        return lambda: token
    if not file:
        return None

    def read() -> str:
        with Path(file).open(encoding="utf-8") as stream:
            return stream.read(TOKEN_BYTES_MAX).strip()

    try:
        read()
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"the token of the topics can't be read: {error}", field=TOKEN_FILE) from error
    return read
