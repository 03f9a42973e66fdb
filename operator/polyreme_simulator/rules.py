"""Every rule of the simulator, and which of them read what others have noted."""

from __future__ import annotations

import dataclasses

from polyreme_simulator.accounting_facts import AccountingFacts
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.batches import BatchFacts
from polyreme_simulator.capacity import CapacityFacts
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.data_facts import DataFacts
from polyreme_simulator.foreign_queue_facts import ForeignQueueFacts
from polyreme_simulator.forgery_facts import ForgeryFacts
from polyreme_simulator.gang_facts import GangFacts
from polyreme_simulator.health_facts import HealthFacts
from polyreme_simulator.incident_facts import IncidentFacts
from polyreme_simulator.leaders import LeaderFacts
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.places import PlaceFacts
from polyreme_simulator.preemptions import PreemptionFacts
from polyreme_simulator.repair_facts import RepairFacts
from polyreme_simulator.start_facts import StartFacts
from polyreme_simulator.successors import SuccessorFacts
from polyreme_simulator.waiting import WaitingFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """One of each kind."""

    history: ClusterHistory
    leaders: LeaderFacts
    capacity: CapacityFacts
    batches: BatchFacts
    successors: SuccessorFacts
    anomalies: AnomalyFacts
    data: DataFacts
    forgeries: ForgeryFacts
    foreign_queues: ForeignQueueFacts
    health: HealthFacts
    repairs: RepairFacts
    incidents: IncidentFacts
    starts: StartFacts
    waiting: WaitingFacts
    places: PlaceFacts
    preemptions: PreemptionFacts
    gangs: GangFacts
    accounts: AccountingFacts


def rules_of(observed: ObservedState) -> Rules:
    """Return the rules of one simulation; a broken one is noted in what was observed."""
    history = ClusterHistory()
    leaders, batches, forgeries = LeaderFacts(observed), BatchFacts(observed), ForgeryFacts(observed)
    capacity = CapacityFacts(observed, leaders, history)
    anomalies = AnomalyFacts(observed, history, batches)
    data = DataFacts(observed, history, anomalies)
    preemptions = PreemptionFacts(observed, history, capacity, batches, anomalies, data)
    return Rules(
        history=history,
        leaders=leaders,
        capacity=capacity,
        batches=batches,
        successors=SuccessorFacts(observed),
        anomalies=anomalies,
        data=data,
        forgeries=forgeries,
        foreign_queues=ForeignQueueFacts(observed),
        health=HealthFacts(observed, history),
        repairs=RepairFacts(observed, history),
        incidents=IncidentFacts(observed, history),
        starts=StartFacts(observed, history, capacity),
        waiting=WaitingFacts(observed, history, capacity, anomalies, data),
        places=PlaceFacts(observed, history, batches, anomalies, data),
        preemptions=preemptions,
        gangs=GangFacts(observed, forgeries, preemptions),
        accounts=AccountingFacts(observed),
    )
