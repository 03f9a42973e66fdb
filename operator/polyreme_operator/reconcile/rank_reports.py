"""Conditions of what the leader's launcher reports on ranks that train: slow ones, and those that it does not see."""

from __future__ import annotations

from polyreme_api.fields import bounded_message
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import ProgressRecord, RankPhase, Straggler
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.types.reasons import ConditionType, Reason


def report(attempt: AttemptStatus, record: ProgressRecord | None, after: StatusBuilder) -> None:
    """Set the conditions of slow ranks and of ranks that are not seen, for as long as they hold."""
    if record is None or not record.released or record.phase is not RankPhase.TRAINING:
        return
    if record.stragglers:
        reason = Reason.SLOW_EXCHANGES if all(each.group for each in record.stragglers) else Reason.SLOW_RANK
        words = "; ".join(sentence(attempt, each) for each in record.stragglers)
        after.set(ConditionType.STRAGGLERS_FOUND, True, reason, bounded_message(words))
    else:
        after.drop(ConditionType.STRAGGLERS_FOUND)
    world, seen = attempt.replicas * attempt.devices, record.watched_ranks
    if seen is not None and seen < world:
        words = f"{seen} of {world} ranks are seen, so a hang is found by health.collectiveTimeoutSeconds alone"
        after.set(ConditionType.HANG_DETECTION_OFF, True, Reason.RANKS_UNSEEN, words)
    else:
        after.drop(ConditionType.HANG_DETECTION_OFF)


def sentence(attempt: AttemptStatus, found: Straggler) -> str:
    """Say who is slow, where, by how much and since when."""
    since = f"{found.slowdown:g} times as long as the others since step {found.since_step}"
    if found.group:
        first, last = found.ranks[0], found.ranks[-1]
        return f"exchanges of ranks {first} to {last} ({found.group}) have taken {since}"
    index, nodes = found.ranks[0] // attempt.devices, attempt.placement.node_by_index()
    # The Lease is written by a pod of the job: only places that the attempt has count.
    node = f" on node {nodes[index]}" if index < len(nodes) else ""
    return f"rank {found.ranks[0]} on worker {index}{node} has computed {since}"
