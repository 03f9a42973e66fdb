"""A set of metrics in a registry of its own, with the rows of its reference page."""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "polyreme"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One metric, as documented in the reference."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


class MetricRegistry:
    """Base of a process's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.described: list[Described] = []
        self._gauges: list[tuple[Gauge, bool]] = []
        """Each gauge, and whether it has labels."""

    def render(self) -> bytes:
        """Return the exposition text, version 0.0.4."""
        return generate_latest(self.registry)

    def clear_gauges(self) -> None:
        """Drop what gauges show: it is stale."""
        for gauge, labelled in self._gauges:
            if labelled:
                gauge.clear()
            else:
                gauge.set(0)

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        """Add a counter."""
        self._describe(name, "counter", labels, help_)
        return Counter(name, help_, labels, namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        """Add a gauge."""
        self._describe(name, "gauge", labels, help_)
        gauge = Gauge(name, help_, labels, namespace=PREFIX, registry=self.registry)
        self._gauges.append((gauge, bool(labels)))
        return gauge

    def histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Add a histogram."""
        self._describe(name, "histogram", labels, help_)
        return Histogram(name, help_, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

    def _describe(self, name: str, kind: str, labels: tuple[str, ...], help_: str) -> None:
        self.described.append(Described(name=f"{PREFIX}_{name}", type=kind, labels=labels, help=help_))
