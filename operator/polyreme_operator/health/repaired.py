"""What a node shows after a repair that succeeded: events from before it are no faults any more.

The agent shows an XID until the node boots, also if a reset has cured it. States, such as a missing GPU, are shown only
while they last, so they count whatever a hook reports.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.node_report import STATES
from polyreme_operator.health.record import Record
from polyreme_operator.health.signs import Reading, Sign


def is_cured(sign: Sign, record: Record) -> bool:
    """Tell whether a sign is of an event from before the repair."""
    return sign.known and bool(sign.boot) and sign.row.code not in STATES and 0.0 < sign.last_s <= record.repaired_at_s


def read(reading: Reading, record: Record | None) -> Reading:
    """Return a reading without the events that a repair has cured."""
    if record is None or not record.repaired_at_s:
        return reading
    left = tuple(sign for sign in reading.signs if not is_cured(sign, record))
    faulty = {sign.condition for sign in left}
    cured = {sign.condition for sign in reading.signs if sign.condition not in faulty}
    return dataclasses.replace(reading, signs=left, clear=reading.clear | cured, cured=bool(cured) or reading.cured)


def forgotten(record: Record, reading: Reading) -> Record:
    """Forget the repair of a node in service that shows no event from before it any more."""
    if not record.repaired_at_s or reading.cured or reading.unknown or not reading.clear:
        return record
    return record.model_copy(update={"repaired_at_s": 0.0})
