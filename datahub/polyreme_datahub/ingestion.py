"""One run of recipes over dataset versions: their flows, their sealing, and one meter of both.

It may be killed at any line and run again, or run twice at once: what is committed is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from polyreme_datahub.registry import progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_meter import FlowMeter, OnProgress
from polyreme_datahub.runner.flow_run import do_nothing, run_flow
from polyreme_datahub.runner.pool import LOOKS_MAX
from polyreme_datahub.runner.sealing import GroupWriter, Sealing

SHOW_EVERY_S = 1.0
"""Time between two reports of what workers of other processes have done."""


class Ingestion:
    """Runs flows and seals them.

    Args:
        context: What work needs of its process.
        versions: All versions.
        operations: All that is done with their records, in order.
        on_progress: Called after each commit.
    """

    def __init__(
        self,
        context: RunContext,
        versions: Iterable[DatasetVersion],
        operations: Sequence[str],
        on_progress: OnProgress | None,
    ) -> None:
        self.context = context
        total = sum(version.records for version in versions)
        self.meter = FlowMeter(operations, total=total, steady_s=context.steady_s, report=on_progress)
        self._shown_s = float("-inf")

    def run(self, flow: Flow, *, on_look: Callable[[], None] = do_nothing, looks_max: int = LOOKS_MAX) -> None:
        """Run a flow to its end, and reject the records whose id an earlier one has; arguments as ``run_flow``."""
        self._know(flow)

        def looked() -> None:
            if self.context.only_seals:
                self._show_others(flow)
            on_look()

        run_flow(self.context, flow, on_counts=self.meter.add, on_look=looked, looks_max=looks_max)
        for version in flow.versions.values():
            progress.reject_duplicates(self.context.database, version.id, now_s=self.context.now_s())

    def sealing(self, flow: Flow, writer: GroupWriter) -> Sealing:
        """Return what seals versions of a flow."""
        return Sealing(self.context, flow, writer, self.meter.add)

    def _show_others(self, flow: Flow) -> None:
        """Report what workers of other processes have done, from the registry, now and then."""
        now_s = self.context.steady_s()
        if now_s - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now_s
            self._know(flow)
            self.meter.show([name for chain in flow.chains for name in chain.operations])

    def _know(self, flow: Flow) -> None:
        done = work_items.done_records(self.context.database, flow.id)
        self.meter.know({name: done.get(chain.name, 0) for chain in flow.chains for name in chain.operations})
