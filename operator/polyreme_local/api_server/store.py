"""The objects themselves: synchronous, in memory, with the API server's rules on versions, deletion and ownership.

Every write gets the next resource version of one counter, so a watch of any kind can resume from the version of a list
of any other. Writers are notified through ``on_change`` (the journal); readers get copies.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from polyreme_cluster.port import (
    KINDS,
    PAGE_OBJECTS,
    AlreadyExistsError,
    ConflictError,
    GoneError,
    InvalidObjectError,
    ListPage,
    Manifest,
    NotFoundError,
    ObjectRef,
    WatchEventType,
)
from polyreme_local.api_server import rules
from polyreme_local.api_server.history import WatchHistory
from polyreme_local.api_server.record import Change, Record, merge, own_json

HISTORY_CHANGES = 10_000
"""Changes of a kind that a watch can at least resume over."""
SNAPSHOTS_MAX = 64
"""Paginated lists that can be under way at a time; the oldest token expires first."""
BOOKMARK_EVERY = 1_000
"""Number of writes after which idle watches get a bookmark."""

Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """A paginated list under way."""

    kind: str
    namespace: str | None
    records: Sequence[Record]
    version: int


class Store:
    """Kubernetes-shaped objects with resource versions.

    Args:
        new_uid: Makes UIDs; deterministic in the simulator.
        now_s: Wall time for timestamps.
        validators: Schema checks by kind.
        history_changes: Least number of changes kept for watches, by kind.
        on_change: Called for every change in order, before anyone sees it.
    """

    def __init__(
        self,
        *,
        new_uid: Callable[[], str],
        now_s: Callable[[], float],
        validators: Mapping[str, rules.Validator] | None = None,
        history_changes: int = HISTORY_CHANGES,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        self._new_uid = new_uid
        self._now_s = now_s
        self._validators = dict(validators or {})
        self._on_change = on_change
        self._version = 0
        self._objects: dict[str, dict[Key, Record]] = {kind: {} for kind in KINDS}
        self._keys: dict[str, list[Key]] = {kind: [] for kind in KINDS}
        self._history = {kind: WatchHistory(kind=kind, limit=history_changes) for kind in KINDS}
        self._live_uids: set[str] = set()
        self._owned: dict[str, dict[ObjectRef, None]] = {}
        self._orphans: deque[ObjectRef] = deque()
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()
        self._snapshot_count = 0

    @property
    def version(self) -> int:
        """Resource version of the newest write."""
        return self._version

    def history(self, kind: str) -> WatchHistory:
        """Watch history of a kind.

        Raises:
            InvalidObjectError: If the kind is unknown.
        """
        self._check_kind(kind)
        return self._history[kind]

    def restore(self, manifests: Iterable[Manifest], *, version: int) -> None:
        """Take the objects of a journal into an empty store; watches can't resume from before."""
        for manifest in manifests:
            record = Record.of(manifest)
            self._insert(record)
        self._version = version
        for history in self._history.values():
            history.forget(version)
        for kind in KINDS:
            for record in self._objects[kind].values():
                self._note_if_orphan(record)

    def records(self, kind: str, *, namespace: str | None = None) -> Iterator[Record]:
        """Iterate over the stored objects in the order of (namespace, name), without copying them."""
        self._check_kind(kind)
        keys, objects = self._keys[kind], self._objects[kind]
        start = 0 if namespace is None else bisect.bisect_left(keys, (namespace, ""))
        for key in keys[start:]:
            if namespace is not None and key[0] != namespace:
                return
            yield objects[key]

    def get(self, ref: ObjectRef) -> Manifest:
        """Return a copy of the object."""
        return self._found(ref).copy()

    def shown(self, ref: ObjectRef) -> Manifest:
        """Return the object itself, for reading only: no caller may change it."""
        return self._found(ref).manifest

    def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        limit: int = PAGE_OBJECTS,
        continue_: str | None = None,
        matches: Callable[[Manifest], bool] | None = None,
    ) -> ListPage:
        """List one page; later pages show the state of the first."""
        if continue_ is None:
            records = [r for r in self.records(kind, namespace=namespace) if matches is None or matches(r.manifest)]
            snapshot = _Snapshot(kind=kind, namespace=namespace, records=records, version=self._version)
            start = 0
            token = None
        else:
            token, start = _parse_token(continue_)
            found = self._snapshots.get(token)
            # A token grants nothing: it continues the list that it was given for, and shows what may be seen of it.
            if found is None or (found.kind, found.namespace) != (kind, namespace):
                raise GoneError(f"continue token of {kind} has expired: list again")
            snapshot = found
        end = start + max(1, limit)
        page = snapshot.records[start:end]
        items = [record.copy() for record in page if matches is None or matches(record.manifest)]
        if end >= len(snapshot.records):
            return ListPage(items=items, resource_version=str(snapshot.version))
        token = token or self._keep(snapshot)
        return ListPage(items=items, resource_version=str(snapshot.version), continue_=f"{token}.{end}")

    def expire_continue_tokens(self) -> None:
        """Forget every paginated list under way, as compaction does."""
        self._snapshots.clear()

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object."""
        own: Manifest = own_json(manifest)
        ref = rules.check_new(own)
        if (ref.namespace, ref.name) in self._objects[ref.kind]:
            raise AlreadyExistsError(f"create refused: {ref} exists already")
        rules.prepare_new(own, uid=self._new_uid(), version=self._version + 1, now_s=self._now_s())
        rules.check_sizes(own)
        self._validate(own)
        record = Record.of(own)
        self._commit(WatchEventType.ADDED, record)
        self._note_if_orphan(record)
        return record.copy()

    def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into an object by compare-and-swap."""
        return self.change(ref, merge_patch, resource_version=resource_version, subresource=subresource).copy()

    def change(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Record:
        """Do as ``patch`` does, for those who don't want a copy of what came of it."""
        old = self._found(ref)
        patch: Manifest = own_json(merge_patch)
        metadata = patch.get("metadata")
        asked = resource_version or (metadata.get("resourceVersion") if isinstance(metadata, dict) else None)
        _check_version(ref, old, asked)
        new = rules.patched(old.manifest, merge(old.manifest, patch), subresource=subresource)
        if new == old.manifest:
            return old
        rules.check_sizes(new)
        metadata = {**new["metadata"], "resourceVersion": str(self._version + 1)}
        if rules.bumps_generation(old.manifest, new):
            metadata["generation"] = metadata.get("generation", 0) + 1
            self._validate(new)
        record = Record.of({**new, "metadata": metadata})
        if metadata.get("deletionTimestamp") and ref.kind != "Pod" and not metadata.get("finalizers"):
            self._remove(record)
        else:
            self._commit(WatchEventType.MODIFIED, record)
        return record

    def delete(
        self, ref: ObjectRef, *, uid: str | None, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete an object, or mark a pod or an object with finalizers for deletion."""
        record = self._found(ref)
        if uid is not None and uid != record.uid:
            raise ConflictError(f"delete refused: {ref} has UID {record.uid}, precondition {uid}")
        _check_version(ref, record, resource_version)
        if ref.kind == "Pod" and record.manifest["metadata"].get("deletionTimestamp"):
            self._shorten_grace(record, grace_period_s)
            return
        grace_s = 0
        if ref.kind == "Pod" and not rules.is_ended_pod(record.manifest):
            grace_s = rules.own_grace_s(record.manifest) if grace_period_s is None else grace_period_s
        if grace_s > 0 or record.manifest["metadata"].get("finalizers"):
            self._mark_deleted(record, grace_s=grace_s)
        else:
            self._remove(record)

    def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Give a pod to a node, as the API server's ``pods/binding`` does."""
        if ref.kind != "Pod":
            raise InvalidObjectError(f"bind refused: {ref} is no pod", field="kind")
        record = self._found(ref)
        bound = rules.bound(record.manifest, uid=uid, node=node, now_s=self._now_s())
        self._commit(
            WatchEventType.MODIFIED,
            Record.of({**bound, "metadata": {**bound["metadata"], "resourceVersion": str(self._version + 1)}}),
        )

    def collect_garbage(self) -> int:
        """Delete what lost every owner, and what that owned in turn; return how many objects were touched."""
        count = 0
        while self._orphans:
            ref = self._orphans.popleft()
            record = self._objects[ref.kind].get((ref.namespace, ref.name))
            if record is None or not self._is_orphan(record):
                continue
            if not record.manifest["metadata"].get("deletionTimestamp"):
                self.delete(ref, uid=record.uid)
                count += 1
        return count

    def _shorten_grace(self, record: Record, grace_s: int | None) -> None:
        """Delete a pod that is being deleted: it goes only by a grace period of 0, which its kubelet sends."""
        metadata = record.manifest["metadata"]
        if grace_s is None or grace_s >= metadata.get("deletionGracePeriodSeconds", 0):
            return
        marked = self._mark_deleted(record, grace_s=grace_s)
        if grace_s == 0 and not metadata.get("finalizers"):
            self._remove(marked)

    def _mark_deleted(self, record: Record, *, grace_s: int) -> Record:
        metadata = record.manifest["metadata"]
        if metadata.get("deletionTimestamp") and record.kind != "Pod":
            return record
        marked = {
            **metadata,
            "deletionTimestamp": rules.timestamp(self._now_s() + grace_s),
            "deletionGracePeriodSeconds": grace_s,
            "resourceVersion": str(self._version + 1),
        }
        if "generation" in metadata and not metadata.get("deletionTimestamp"):
            marked["generation"] = metadata["generation"] + 1
        changed = Record.of({**record.manifest, "metadata": marked})
        self._commit(WatchEventType.MODIFIED, changed)
        return changed

    def _remove(self, record: Record) -> None:
        metadata = {**record.manifest["metadata"], "resourceVersion": str(self._version + 1)}
        self._commit(WatchEventType.DELETED, Record.of({**record.manifest, "metadata": metadata}))
        for dependent in self._owned.pop(record.uid, {}):
            self._orphans.append(dependent)

    def _commit(self, change: WatchEventType, record: Record) -> None:
        if len(record.blob) > rules.OBJECT_BYTES_MAX:
            ref = ObjectRef(kind=record.kind, namespace=record.namespace, name=record.name)
            raise InvalidObjectError(
                f"{ref} is too large: {len(record.blob)} bytes, expected at most {rules.OBJECT_BYTES_MAX}"
            )
        entry = Change(change, record)
        if self._on_change is not None:
            self._on_change(entry)
        self._version = record.version
        if change is WatchEventType.DELETED:
            self._evict(record)
        else:
            self._insert(record)
        self._history[record.kind].append(entry)
        if self._version % BOOKMARK_EVERY == 0:
            for history in self._history.values():
                history.wake()

    def _insert(self, record: Record) -> None:
        key = (record.namespace, record.name)
        old = self._objects[record.kind].get(key)
        if old is None:
            bisect.insort(self._keys[record.kind], key)
            self._live_uids.add(record.uid)
        self._objects[record.kind][key] = record
        ref = ObjectRef(kind=record.kind, namespace=record.namespace, name=record.name)
        owners = rules.owner_uids(record.manifest)
        for uid in rules.owner_uids(old.manifest) if old is not None else ():
            if uid not in owners:
                self._owned.get(uid, {}).pop(ref, None)
        for uid in owners:
            self._owned.setdefault(uid, {})[ref] = None

    def _evict(self, record: Record) -> None:
        key = (record.namespace, record.name)
        del self._objects[record.kind][key]
        keys = self._keys[record.kind]
        del keys[bisect.bisect_left(keys, key)]
        self._live_uids.discard(record.uid)
        ref = ObjectRef(kind=record.kind, namespace=record.namespace, name=record.name)
        for uid in rules.owner_uids(record.manifest):
            self._owned.get(uid, {}).pop(ref, None)

    def _note_if_orphan(self, record: Record) -> None:
        if self._is_orphan(record):
            self._orphans.append(ObjectRef(kind=record.kind, namespace=record.namespace, name=record.name))

    def _is_orphan(self, record: Record) -> bool:
        owners = rules.owner_uids(record.manifest)
        return bool(owners) and not any(uid in self._live_uids for uid in owners)

    def _found(self, ref: ObjectRef) -> Record:
        self._check_kind(ref.kind)
        record = self._objects[ref.kind].get((ref.namespace, ref.name))
        if record is None:
            raise NotFoundError(f"not found: {ref}")
        return record

    def _check_kind(self, kind: str) -> None:
        if kind not in self._objects:
            raise InvalidObjectError(f"unknown kind: {kind!r}, expected one of {', '.join(KINDS)}", field="kind")

    def _validate(self, manifest: Manifest) -> None:
        validator = self._validators.get(manifest["kind"])
        if validator is not None:
            validator(manifest)

    def _keep(self, snapshot: _Snapshot) -> str:
        self._snapshot_count += 1
        token = json.dumps(self._snapshot_count)
        self._snapshots[token] = snapshot
        while len(self._snapshots) > SNAPSHOTS_MAX:
            self._snapshots.popitem(last=False)
        return token


def _check_version(ref: ObjectRef, record: Record, resource_version: str | None) -> None:
    if resource_version is not None and resource_version != str(record.version):
        raise ConflictError(f"{ref}: resource version {record.version}, precondition {resource_version}")


def _parse_token(token: str) -> tuple[str, int]:
    name, _, offset = token.partition(".")
    if not offset.isascii() or not offset.isdigit():
        raise GoneError(f"continue token is none of ours: {token!r}")
    return name, int(offset)
