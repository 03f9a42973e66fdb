"""Lists in pages: each later page shows the state that the first one was taken from."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence

from polyreme_cluster.port import GoneError, ListPage, Manifest
from polyreme_local.api_server.record import Record

SNAPSHOTS_MAX = 64
"""Paginated lists that can be under way at a time; the oldest token expires first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The objects of one list."""

    kind: str
    namespace: str | None
    records: Sequence[Record]
    version: int


class ListPages:
    """The paginated lists under way."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._count = 0

    def expire(self) -> None:
        """Forget every list."""
        self._snapshots.clear()

    def first(self, snapshot: Snapshot, *, limit: int) -> ListPage:
        """Return the first page, and keep the list if there are more."""
        items = [record.copy() for record in snapshot.records[: max(1, limit)]]
        return self._page(snapshot, items, max(1, limit), token=None)

    def following(
        self,
        continue_: str,
        *,
        kind: str,
        namespace: str | None,
        limit: int,
        matches: Callable[[Manifest], bool] | None,
    ) -> ListPage:
        """Return the page to which a token leads.

        Raises:
            GoneError: If the token has expired, or is of another list.
        """
        token, start = _parse_token(continue_)
        snapshot = self._snapshots.get(token)
        # A token grants nothing: it continues the list that it was given for, and shows what may be seen of it.
        if snapshot is None or (snapshot.kind, snapshot.namespace) != (kind, namespace):
            raise GoneError(f"continue token of {kind} has expired: list again")
        end = start + max(1, limit)
        page = snapshot.records[start:end]
        items = [record.copy() for record in page if matches is None or matches(record.manifest)]
        return self._page(snapshot, items, end, token=token)

    def _page(self, snapshot: Snapshot, items: list[Manifest], end: int, *, token: str | None) -> ListPage:
        version = str(snapshot.version)
        if end >= len(snapshot.records):
            return ListPage(items=items, resource_version=version)
        return ListPage(items=items, resource_version=version, continue_=f"{token or self._keep(snapshot)}.{end}")

    def _keep(self, snapshot: Snapshot) -> str:
        self._count += 1
        token = json.dumps(self._count)
        self._snapshots[token] = snapshot
        while len(self._snapshots) > SNAPSHOTS_MAX:
            self._snapshots.popitem(last=False)
        return token


def _parse_token(token: str) -> tuple[str, int]:
    name, _, offset = token.partition(".")
    if not offset.isascii() or not offset.isdigit():
        raise GoneError(f"continue token is none of ours: {token!r}")
    return name, int(offset)
