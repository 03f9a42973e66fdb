"""The objects themselves: synchronous, in memory, with the API server's rules on versions, deletion and ownership.

Every write gets the next resource version of one counter, so a watch of any kind can resume from the version of a list
of any other. Writers are notified through ``on_change`` (the journal); readers get copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from polyreme_cluster.port import (
    KINDS,
    PAGE_OBJECTS,
    AlreadyExistsError,
    ConflictError,
    InvalidObjectError,
    ListPage,
    Manifest,
    ObjectRef,
    WatchEventType,
)
from polyreme_local.api_server import rules
from polyreme_local.api_server.history import WatchHistory
from polyreme_local.api_server.objects import Objects
from polyreme_local.api_server.pages import ListPages, Snapshot
from polyreme_local.api_server.record import Change, Record, merge, own_json

HISTORY_CHANGES = 10_000
"""Changes of a kind that a watch can at least resume over."""
BOOKMARK_EVERY = 1_000
"""Number of writes after which idle watches get a bookmark."""


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
        self._objects = Objects()
        self._history = {kind: WatchHistory(kind=kind, limit=history_changes) for kind in KINDS}
        self._pages = ListPages()

    @property
    def version(self) -> int:
        """Resource version of the newest write."""
        return self._version

    def history(self, kind: str) -> WatchHistory:
        """Watch history of a kind.

        Raises:
            InvalidObjectError: If the kind is unknown.
        """
        self._objects.check_kind(kind)
        return self._history[kind]

    def restore(self, manifests: Iterable[Manifest], *, version: int) -> None:
        """Take the objects of a journal into an empty store; watches can't resume from before."""
        for manifest in manifests:
            self._objects.insert(Record.of(manifest))
        self._version = version
        for history in self._history.values():
            history.forget(version)
        self._objects.find_orphans()

    def records(self, kind: str, *, namespace: str | None = None) -> Iterator[Record]:
        """Iterate over the stored objects in the order of (namespace, name), without copying them."""
        return self._objects.records(kind, namespace=namespace)

    def get(self, ref: ObjectRef) -> Manifest:
        """Return a copy of the object."""
        return self._objects.found(ref).copy()

    def shown(self, ref: ObjectRef) -> Manifest:
        """Return the object itself, for reading only: no caller may change it."""
        return self._objects.found(ref).manifest

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
            return self._pages.first(Snapshot(kind, namespace, records, self._version), limit=limit)
        return self._pages.following(continue_, kind=kind, namespace=namespace, limit=limit, matches=matches)

    def expire_continue_tokens(self) -> None:
        """Forget every paginated list under way, as compaction does."""
        self._pages.expire()

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; in a dry run only say what it would be."""
        own: Manifest = own_json(manifest)
        ref = rules.check_new(own)
        if self._objects.get(ref) is not None:
            raise AlreadyExistsError(f"create refused: {ref} exists already")
        rules.prepare_new(own, uid=self._new_uid(), version=self._version + 1, now_s=self._now_s())
        rules.check_sizes(own)
        self._validate(own)
        if dry_run:
            own["metadata"].pop("resourceVersion")
            return own
        record = Record.of(own)
        self._commit(WatchEventType.ADDED, record)
        self._objects.note_if_orphan(record)
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
        old = self._objects.found(ref)
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
        record = self._objects.found(ref)
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
        record = self._objects.found(ref)
        bound = rules.bound(record.manifest, uid=uid, node=node, now_s=self._now_s())
        self._commit(
            WatchEventType.MODIFIED,
            Record.of({**bound, "metadata": {**bound["metadata"], "resourceVersion": str(self._version + 1)}}),
        )

    def collect_garbage(self) -> int:
        """Delete what lost every owner, and what that owned in turn; return how many objects were touched."""
        count = 0
        while (record := self._objects.next_orphan()) is not None:
            if not record.manifest["metadata"].get("deletionTimestamp"):
                self.delete(record.ref, uid=record.uid)
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
        self._objects.release_owned(record.uid)

    def _commit(self, change: WatchEventType, record: Record) -> None:
        if len(record.blob) > rules.OBJECT_BYTES_MAX:
            raise InvalidObjectError(
                f"{record.ref} is too large: {len(record.blob)} bytes, expected at most {rules.OBJECT_BYTES_MAX}"
            )
        entry = Change(change, record)
        if self._on_change is not None:
            self._on_change(entry)
        self._version = record.version
        if change is WatchEventType.DELETED:
            self._objects.evict(record)
        else:
            self._objects.insert(record)
        self._history[record.kind].append(entry)
        if self._version % BOOKMARK_EVERY == 0:
            for history in self._history.values():
                history.wake()

    def _validate(self, manifest: Manifest) -> None:
        validator = self._validators.get(manifest["kind"])
        if validator is not None:
            validator(manifest)


def _check_version(ref: ObjectRef, record: Record, resource_version: str | None) -> None:
    if resource_version is not None and resource_version != str(record.version):
        raise ConflictError(f"{ref}: resource version {record.version}, precondition {resource_version}")
