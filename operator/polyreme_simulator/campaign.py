"""Many seeds, on several processes, and what they reached between them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from polyreme_simulator.anomalies import CLASSES
from polyreme_simulator.datahub import FAULTS as DATA_FAULTS
from polyreme_simulator.kubelet_faults import KINDS as KUBELET_FAULTS
from polyreme_simulator.run import Result, simulate

CHUNK_SEEDS = 4
POINT_CHARACTERS = 41
WRITE_POINTS = (
    "bind Pod",
    "create ConfigMap",
    "create Event",
    "create Lease",
    "create Lease of leadership",
    "create Pod",
    "create Role",
    "create RoleBinding",
    "create Secret",
    "create Service",
    "create ServiceAccount",
    "delete Pod",
    "delete TrainingJob",
    "patch ClusterTopology",
    "patch ConfigMap",
    "patch Lease of leadership",
    "patch TrainingJob",
    "patch TrainingJob that begins an attempt",
    "patch TrainingJob that is preempted",
    "patch TrainingQueue",
)
"""Every place where the operator writes."""
WRITE_FAULTS = (
    "conflict",
    "too_many",
    "error_before",
    "error_after",
    "timeout_before",
    "timeout_after",
    "timeout_late",
    "slow",
    "stopped",
    "crash_before",
    "crash_after",
)
WATCH_POINTS = (
    "watch ClusterTopology",
    "watch ConfigMap",
    "watch Lease",
    "watch Node",
    "watch Pod",
    "watch PriorityClass",
    "watch TrainingJob",
    "watch TrainingQueue",
)
WATCH_FAULTS = ("watch_drop", "watch_gone", "watch_lag")
EVENTS = (
    "an old leader continues",
    "another replica leads",
    "both replicas crash",
    "foreign pod",
    "gang pauses",
    "history compacted",
    "job deleted",
    "launcher killed",
    "launcher stopped",
    "namespace deleted",
    "node cordoned",
    "node cut off",
    "node dies",
    "node out of service",
    "node relabelled",
    "node removed",
    "node tainted",
    "pod deleted",
    "preempted",
    "priority class changed",
    "queue changed",
    "queue cycle",
    "queue deleted",
    "queue stopped",
    "rank exits",
    "rank hangs",
    "rank killed",
    "rank stopped",
    "replica crashes",
    "replica replaced",
    "replica stopped by hand",
    "scale",
    "stuck Terminating",
    "suspend",
    "topology changed",
    "Unschedulable",
    *CLASSES,
    *DATA_FAULTS,
    *KUBELET_FAULTS,
)
"""What must happen at least once over the seeds, beside the cells of both tables."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What a range of seeds showed."""

    seeds: int
    attempts: int
    succeeded: int
    broken: tuple[Result, ...]
    """Seeds that broke a rule."""
    reached: Mapping[tuple[str, str], int]
    """How often each fault came about at each point."""

    @property
    def unreached(self) -> list[tuple[str, str]]:
        """Cells (fault, point) that are possible, and that no seed reached."""
        return [cell for cell in cells() if not self.reached.get(cell)]


def cells() -> list[tuple[str, str]]:
    """Every fault at every point where it could strike, and every other event."""
    writes = itertools.product(WRITE_FAULTS, WRITE_POINTS)
    return [*writes, *itertools.product(WATCH_FAULTS, WATCH_POINTS), *((event, "") for event in EVENTS)]


def run_campaign(
    seeds: Iterable[int],
    *,
    processes: int,
    until_violation: bool = False,
    anomaly: str | None = None,
    health: bool = False,
    on_done: Callable[[int, Sequence[Result]], None] | None = None,
) -> Campaign:
    """Run seeds.

    Args:
        seeds: Which.
        processes: On so many processes.
        until_violation: Whether to stop at the first seed that breaks a rule.
        anomaly: The class of anomalies, in place of each seed's own.
        health: Whether nodes have agents and the operator a NodeFaultPolicy.
        on_done: Called after each seed with how many are done and which of them broke a rule.
    """
    reached: Counter[tuple[str, str]] = Counter()
    broken: list[Result] = []
    attempts = succeeded = done = 0
    with concurrent.futures.ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        one = functools.partial(simulate, anomaly=anomaly, health=health)
        for result in pool.map(one, seeds, chunksize=CHUNK_SEEDS):
            done += 1
            reached.update(result.reached)
            attempts += result.attempts
            succeeded += result.succeeded
            if result.violations:
                broken.append(result)
            if on_done is not None:
                on_done(done, broken)
            if broken and until_violation:
                pool.shutdown(cancel_futures=True)
                break
    return Campaign(seeds=done, attempts=attempts, succeeded=succeeded, broken=tuple(broken), reached=dict(reached))


def table(campaign: Campaign) -> str:
    """Return what was reached, a row a point, a column a fault."""
    rows = []
    for faults, points in ((WRITE_FAULTS, WRITE_POINTS), (WATCH_FAULTS, WATCH_POINTS)):
        rows.append(" " * POINT_CHARACTERS + "".join(f"{fault:>15}" for fault in faults))
        for point in points:
            counts = (campaign.reached.get((fault, point), 0) for fault in faults)
            rows.append(f"{point:{POINT_CHARACTERS}}" + "".join(f"{count:>15}" for count in counts))
    others = sorted((name, count) for (name, point), count in campaign.reached.items() if not point)
    rows += [f"{name:{POINT_CHARACTERS}}{count:15d}" for name, count in others]
    return "\n".join(rows)


def replay(result: Result, *, anomaly: str | None = None, health: bool = False) -> str:
    """Return a broken rule and the command that shows it again."""
    kind = (f" --anomaly '{anomaly}'" if anomaly else "") + (" --health" if health else "")
    command = f"python -m polyreme_simulator --seed {result.seed}{kind}"
    return f"seed {result.seed}: {result.violations[0]}\n    replay: {command}"


def _quiet() -> None:
    """Say nothing, and leave what is loaded to the end of the process: it is no seed's."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
