"""The key of an installation: one Secret in the operator's namespace, made once, which its replicas share.

The first leader makes it by create-if-absent, so that no file of the installation holds random bytes. It is read when a
replica begins to lead, and never changed. A leader creates it again from memory if it is deleted: with another
key, the attempts that run then could not be verified, and every gang would have to start again.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError, RetryableError
from polyreme_api.labels import INSTALLATION_KEY_NAME
from polyreme_api.signed_progress import KEY_BYTES
from polyreme_cluster.port import AlreadyExistsError, ClusterPort, Manifest, NotFoundError, ObjectRef, PortError
from polyreme_operator.settings import Settings
from polyreme_operator.types.job_keys import JobKeys

KEY, PREVIOUS = "key", "previous"
"""Entries of the Secret: the key of new gangs, and, if it was replaced, that of gangs that still run."""
RESTORE_EVERY_S = 300.0
_log = logging.getLogger(__name__)


class InstallationKey:
    """Reads the Secret, and keeps it in place.

    Args:
        port: The cluster.
        clock: Time of waits.
        settings: The operator's namespace, and the delays of retries.
        entropy: Returns random bytes; ``secrets.token_bytes``.
    """

    def __init__(self, port: ClusterPort, clock: Clock, settings: Settings, *, entropy: Callable[[int], bytes]) -> None:
        self._port, self._clock, self._settings, self._entropy = port, clock, settings, entropy
        self._ref = ObjectRef(kind="Secret", namespace=settings.namespace, name=INSTALLATION_KEY_NAME)
        self._found: Manifest = {}

    async def read(self) -> JobKeys:
        """Return the keys, after creating one if there is none.

        Raises:
            InvalidConfigError: If the Secret holds something else.
            PortError: If the operator may not read or create it.
        """
        failures = 0
        while True:
            try:
                self._found = await self._read_or_create()
                return keys_of(self._found)
            except RetryableError as error:
                failures += 1
                _log.info("%s is read later: %s", self._ref, error)
                await self._clock.sleep(self._settings.backoff_s(failures))

    async def keep(self) -> None:
        """Create the Secret again whenever it was deleted, until cancelled."""
        while True:
            await self._clock.sleep(RESTORE_EVERY_S)
            try:
                await self._port.create(self._secret(self._found["data"]))
            except AlreadyExistsError:
                continue
            except PortError as error:
                _log.info("%s is not confirmed: %s", self._ref, error)
            else:
                _log.warning("%s was deleted and is created again with the same key", self._ref)

    async def _read_or_create(self) -> Manifest:
        try:
            return await self._port.get(self._ref)
        except NotFoundError:
            key = base64.b64encode(self._entropy(KEY_BYTES)).decode()
        try:
            return await self._port.create(self._secret({KEY: key}))
        except AlreadyExistsError:
            # Another replica was faster.
            return await self._port.get(self._ref)

    def _secret(self, data: dict[str, str]) -> Manifest:
        metadata = {"name": self._ref.name, "namespace": self._ref.namespace}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def keys_of(secret: Manifest) -> JobKeys:
    """Return the keys in a Secret.

    Raises:
        InvalidConfigError: Naming the entry that is no key.
    """
    data, ref = secret.get("data") or {}, ObjectRef.of(secret)
    found = []
    for name in (KEY, PREVIOUS) if data.get(PREVIOUS) else (KEY,):
        try:
            key = base64.b64decode(data.get(name) or "", validate=True)
        except (binascii.Error, TypeError, ValueError):
            key = b""
        if len(key) < KEY_BYTES:
            words = f"{ref}: entry {name} is no key of the installation: expected {KEY_BYTES} random bytes in base64"
            raise InvalidConfigError(words, field=f"data.{name}")
        found.append(key)
    return JobKeys(*found)
