"""Existing objects, and the newest resource version seen of each; older states are ignored except after a restore.

Versions of one kind are ordered integers (KEP-5504) and lists are consistent, so a list shows an older state of an
object than the one that is known only after a restore from a backup. Then every known version is void: states written
since the restore have lower versions, and some have the very versions of states that no longer exist.
"""

from __future__ import annotations

from collections import defaultdict

from polyreme_cluster.port import ObjectRef

VOID = -1
"""Void version of an object: every state of it is newer."""


class SeenObjects:
    """Objects that exist by kind, and newest versions, including those of objects deleted since the last list."""

    def __init__(self) -> None:
        self._versions: dict[ObjectRef, int] = {}
        self.present: dict[str, set[ObjectRef]] = defaultdict(set)
        """By kind."""
        self._newest: dict[str, int] = defaultdict(lambda: VOID)

    def __contains__(self, ref: ObjectRef) -> bool:
        """Tell whether an object is known, or known to be deleted."""
        return ref in self._versions

    def of(self, ref: ObjectRef) -> int:
        """Return the newest version that was seen of an object."""
        return self._versions.get(ref, VOID)

    def newest(self, kind: str) -> int:
        """Return the newest version that was seen of any object of a kind."""
        return self._newest[kind]

    def shows_restore(self, ref: ObjectRef, version: int, *, listed_at: int) -> bool:
        """Tell whether a list at ``listed_at`` shows an older state than the known one, which it must contain."""
        return version < self.of(ref) <= listed_at

    def take(self, ref: ObjectRef, version: int) -> None:
        """Note the version of a state."""
        self._versions[ref] = version
        self._newest[ref.kind] = max(version, self._newest[ref.kind])

    def is_present(self, ref: ObjectRef) -> bool:
        """Tell whether an object exists."""
        return ref in self.present[ref.kind]

    def drop_deleted(self, kind: str, *, version: int) -> None:
        """Forget deleted objects that a list at ``version`` did not show."""
        for ref in [ref for ref in self._versions if ref.kind == kind and not self.is_present(ref)]:
            if self._versions[ref] <= version:
                del self._versions[ref]

    def void(self) -> None:
        """Void all versions, since the cluster was restored: the next state of every object is accepted."""
        self._versions = dict.fromkeys(self._versions, VOID)
        self._newest.clear()
