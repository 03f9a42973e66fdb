"""The objects that a job owns beside its pods and its Lease: Service, Secret, and its leader's Role and RoleBinding.

They are not watched: the operator may not read Secrets, and a watch of each kind for something that is deleted by hand
once a year costs more than it saves. Instead each is created again from time to time while its job is active, and
before an attempt that starts pods; an API server answers that it exists already.
"""

from __future__ import annotations

import zlib

CONFIRMED_S = 300.0
"""Longest time for which an object is taken to exist after its creation was answered; the shortest is half of it."""


class ChildIndex:
    """By job, the kinds of objects that are known to exist, and since when."""

    def __init__(self) -> None:
        self._confirmed_s: dict[str, dict[str, float]] = {}
        self._renewed: set[str] = set()

    def confirm(self, uid: str, kind: str, *, now_s: float) -> None:
        """Note that the API server has said that the object exists."""
        self._confirmed_s.setdefault(uid, {})[kind] = now_s

    def known(self, uid: str, *, now_s: float) -> frozenset[str]:
        """Return the kinds that need not be created again now."""
        lasts_s = _lasts_s(uid)
        return frozenset(kind for kind, at_s in self._confirmed_s.get(uid, {}).items() if abs(now_s - at_s) < lasts_s)

    def until_s(self, uid: str) -> float | None:
        """Return when the first of them must be confirmed again; None where none is known."""
        confirmed_s = self._confirmed_s.get(uid)
        return min(confirmed_s.values()) + _lasts_s(uid) if confirmed_s else None

    def renew_secret(self, uid: str) -> None:
        """Note that the Secret was created while pods that have read an earlier one were there."""
        self._renewed.add(uid)

    def is_secret_renewed(self, uid: str) -> bool:
        """Tell whether pods that are created now can't join those that are there."""
        return uid in self._renewed

    def begin(self, uid: str, *, fresh: bool) -> None:
        """Note that an attempt starts pods: all objects are confirmed again. ``fresh``: no earlier pod stays."""
        self._confirmed_s.pop(uid, None)
        if fresh:
            self._renewed.discard(uid)

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._confirmed_s.pop(uid, None)
        self._renewed.discard(uid)


def _lasts_s(uid: str) -> float:
    """Spread the jobs: a new leader creates the objects of all of them at once."""
    return CONFIRMED_S * (0.5 + zlib.crc32(uid.encode()) / 2**33)
