"""The objects that a job owns beside its pods and its Lease: Service, Secret, and its leader's account and rights.

They are not watched: the operator may not read Secrets, and watches of these kinds would cost more than they save.
Instead each object is created again from time to time while its job is active, and before an attempt that starts pods;
normally the API server answers that it exists already.
"""

from __future__ import annotations

import zlib

CONFIRMED_S = 300.0
"""Longest time for which an object is assumed to exist after it was confirmed; the shortest is half of it."""


class ChildIndex:
    """Kinds of objects that are known to exist, and since when, by job."""

    def __init__(self) -> None:
        self._confirmed_s: dict[str, dict[str, float]] = {}

    def confirm(self, uid: str, kind: str, *, now_s: float) -> None:
        """Note that the API server has confirmed the object."""
        self._confirmed_s.setdefault(uid, {})[kind] = now_s

    def known(self, uid: str, *, now_s: float) -> frozenset[str]:
        """Return the kinds that are confirmed at present."""
        lasts_s = _lasts_s(uid)
        return frozenset(kind for kind, at_s in self._confirmed_s.get(uid, {}).items() if abs(now_s - at_s) < lasts_s)

    def was_confirmed(self, uid: str, kind: str) -> bool:
        """Tell whether the object was confirmed since the attempt began, however long ago."""
        return kind in self._confirmed_s.get(uid, {})

    def until_s(self, uid: str) -> float | None:
        """Return when the first of them must be confirmed again; None if none is known."""
        confirmed_s = self._confirmed_s.get(uid)
        return min(confirmed_s.values()) + _lasts_s(uid) if confirmed_s else None

    def begin(self, uid: str) -> None:
        """Confirm all objects again, since an attempt starts pods."""
        self._confirmed_s.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._confirmed_s.pop(uid, None)


def _lasts_s(uid: str) -> float:
    """Spread confirmations over time, since a new leader confirms the objects of all jobs at once."""
    return CONFIRMED_S * (0.5 + zlib.crc32(uid.encode()) / 2**33)
