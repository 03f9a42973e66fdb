"""The simulated cluster as the rules read it: its time, machines, launchers and gangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from polyreme_api.environment import PodEnvironment
from polyreme_local.api_server.store import Store
from polyreme_simulator.event_loop import SimClock
from polyreme_simulator.nodes import SimNode
from polyreme_simulator.training import Gang, Rank, Root


class LauncherView(Protocol):
    """One launcher's process."""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""

    @property
    def zombie(self) -> bool:
        """Whether its pod was deleted by force while its node was away."""

    @property
    def node(self) -> str:
        """Name of the machine it runs on."""

    @property
    def pod(self) -> PodEnvironment:
        """What its pod says it is."""

    @property
    def ranks(self) -> Mapping[int, Rank]:
        """Its ranks by number."""


class ClusterView(Protocol):
    """The simulated cluster, for reading; only ``reached`` is written to."""

    @property
    def clock(self) -> SimClock:
        """The clock of the cluster's machines."""

    @property
    def store(self) -> Store:
        """The API server's store."""

    @property
    def reached(self) -> Counter[tuple[str, str]]:
        """How often each fault or situation came about."""

    @property
    def faulty(self) -> bool:
        """Whether faults last."""

    @property
    def calm_since_s(self) -> float:
        """When the faults ended."""

    @property
    def steps(self) -> Mapping[str, int]:
        """Steps that each job trains, by UID."""

    @property
    def nodes(self) -> Mapping[str, SimNode]:
        """Machines by name, including those that are gone."""

    @property
    def lost_s(self) -> Mapping[str, float]:
        """When each machine was last away, or marked as out of service."""

    @property
    def launchers(self) -> Mapping[str, LauncherView]:
        """Launchers by the UID of their pod, including those that ended."""

    @property
    def gangs(self) -> Mapping[tuple[str, int], Gang]:
        """Gangs by UID of the job and attempt."""

    def time_s(self) -> float:
        """Return virtual time."""

    def root(self, uid: str) -> Root:
        """Return a job's checkpoint root."""

    def usable(self, name: str) -> bool:
        """Tell whether new pods may go to a machine, as far as its Node object says."""
