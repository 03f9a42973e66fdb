"""Metrics that ranks report with their newest step; a bounded number of jobs has series."""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import Gauge

from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.snapshot import JobSnapshot

TRAINING_JOBS_MAX = 50
"""Jobs with training series, some of them by layer."""


class TrainingMetrics(Observer):
    """The newest step of jobs that train."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry, newest = registry, f"the {TRAINING_JOBS_MAX} jobs that trained last"
        self._gauges: list[Gauge] = []
        self.job_step = self._gauge("job_step", f"Newest step of a job; {newest}.")
        self.job_loss = self._gauge("job_loss", f"Loss of the newest step; {newest}.")
        self.job_held_out_loss = self._gauge("job_held_out_loss", f"Newest held-out loss, over all sets; {newest}.")
        self.job_objective = self._gauge(
            "job_objective",
            f"What the objective of the stage measured in the newest step: rewardMargin, pairAccuracy, ...; {newest}.",
            "measure",
        )
        self.job_expert_load_ratio = self._gauge(
            "job_expert_load_ratio",
            "Tokens of a layer's busiest expert divided by the mean of its experts, in the newest step; 1 is even.",
            "layer",
        )
        self.job_router_entropy_nats = self._gauge(
            "job_router_entropy_nats",
            "Mean entropy of a token's router scores, by layer, in the newest step.",
            "layer",
        )
        self.job_rows_dropped = self._gauge(
            "job_rows_dropped",
            "Rows dropped because experts were at capacity, by layer, in the newest step.",
            "layer",
        )
        self.job_stragglers = self._gauge(
            "job_stragglers", f"Ranks and groups that slow a job down, as its condition names them; {newest}."
        )
        self.job_watched_ranks_ratio = self._gauge(
            "job_watched_ranks_ratio",
            f"Ranks that the detection of hangs sees over all: below 1 it finds none; {newest}.",
        )
        self._jobs: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._measures: dict[str, frozenset[str]] = {}

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """Show the newest step's metrics of the current attempt."""
        job, record = snapshot.job, current_record(snapshot)
        if record is None or record.loss is None or job.status.finished:
            return
        own = job.namespace, job.name
        self._jobs[job.uid] = own
        self._jobs.move_to_end(job.uid)
        self.job_step.labels(*own).set(record.step)
        self.job_loss.labels(*own).set(record.loss)
        if record.held_out_loss is not None:
            self.job_held_out_loss.labels(*own).set(record.held_out_loss)
        self.job_stragglers.labels(*own).set(len(record.stragglers))
        if (attempt := job.attempt) is not None and record.watched_ranks is not None:
            self.job_watched_ranks_ratio.labels(*own).set(record.watched_ranks / (attempt.replicas * attempt.devices))
        measures = frozenset(record.objective)
        if measures != self._measures.get(job.uid, frozenset()):  # another stage
            self.job_objective.remove_by_labels(_labels(own))
            self._measures[job.uid] = measures
        for measure, value in record.objective.items():
            self.job_objective.labels(*own, measure).set(value)
        if (routing := record.routing) is not None:
            for gauge, values in (
                (self.job_expert_load_ratio, routing.load_max),
                (self.job_router_entropy_nats, routing.entropy),
                (self.job_rows_dropped, routing.dropped),
            ):
                for layer, value in enumerate(values, start=routing.first_layer):
                    gauge.labels(*own, str(layer)).set(value)
        if len(self._jobs) > TRAINING_JOBS_MAX:
            self.on_job_deleted(next(iter(self._jobs)))

    def on_job_deleted(self, uid: str) -> None:
        """Drop the series of a job."""
        self._measures.pop(uid, None)
        if (own := self._jobs.pop(uid, None)) is not None:
            for gauge in self._gauges:
                gauge.remove_by_labels(_labels(own))

    def clear(self) -> None:
        """Forget all jobs: another replica leads."""
        self._jobs.clear()
        self._measures.clear()

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        """Add a gauge whose series end with their job."""
        gauge = self._registry.gauge(name, help_, "namespace", "job", *labels)
        self._gauges.append(gauge)
        return gauge


def _labels(own: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("namespace", "job"), own, strict=True))
