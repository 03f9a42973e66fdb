"""Delivery of alerts to a webhook over HTTPS, signed if there is a key.

URL and key are files of a mounted Secret, read at each delivery so that a rotation needs no restart. The URL is often a
secret itself: neither logs nor errors show it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from polyreme_api.errors import InvalidConfigError
from polyreme_cluster.arguments import LOOPBACK
from polyreme_operator.publishing.alerts import Alert

URL_FILE, KEY_FILE = "url", "key"
TIMEOUT_S = 10.0
_ACCEPTED = range(200, 300)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where alerts are sent."""

    folder: Path
    """Folder with the file ``url`` and, to sign what is sent, ``key``."""
    runbook_url: str

    async def deliver(self, session: aiohttp.ClientSession, alert: Alert) -> bool:
        """Send one alert; tell whether the receiver has accepted it."""
        body = json.dumps(alert.payload(self.runbook_url), ensure_ascii=False).encode()
        try:
            headers = {"Content-Type": "application/json", "Polyreme-Event-Id": alert.id, **self._signature(body)}
            async with session.post(
                self.read_url(),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as answer:
                why = f"it answered {answer.status}"
                accepted = answer.status in _ACCEPTED
        except InvalidConfigError as error:
            accepted, why = False, error.message
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            accepted, why = False, type(error).__name__  # its text names the URL
        if not accepted:
            _log.warning("alert %s (%s) was not delivered to the webhook: %s; retrying", alert.id, alert.kind, why)
        return accepted

    def read_url(self) -> str:
        """Read the URL.

        Raises:
            InvalidConfigError: If it can't be read, or is no URL of HTTPS; HTTP is for receivers on this machine.
        """
        try:
            text = (self.folder / URL_FILE).read_text(encoding="utf-8").strip()
            url = urlsplit(text)
            host = url.hostname or ""
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"no URL can be read from the file {URL_FILE!r} ({type(error).__name__}), expected one of https",
                field="--webhook-secret",
            ) from error
        if not host or not (url.scheme == "https" or (url.scheme == "http" and host in LOOPBACK)):
            raise InvalidConfigError(
                f"the URL in the file {URL_FILE!r} has the scheme {url.scheme[:16]!r}, expected https://host/path",
                field="--webhook-secret",
            )
        return text

    def _signature(self, body: bytes) -> dict[str, str]:
        try:
            key = (self.folder / KEY_FILE).read_bytes().strip()
        except FileNotFoundError:
            return {}
        return {"Polyreme-Signature": f"sha256={hmac.new(key, body, hashlib.sha256).hexdigest()}"} if key else {}
