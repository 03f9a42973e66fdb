"""Leaders of a stage's jobs, as far as the operator sees them: Leases that are renewed with progress."""

import asyncio
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import NotFoundError
from tests.unit.operator.operator_stage import Stage

RENEW_EVERY_S = 5.0
STEPS_EACH = 10
CHECKPOINT_EVERY = 20


class Leaders:
    """Renews the Leases of all admitted jobs; a job that shall stop stops with a checkpoint."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.done: set[str] = set()
        """Names of jobs that have trained their last step."""
        self._steps: dict[str, int] = {}

    async def renew(self) -> None:
        """Play until cancelled."""
        while True:
            for record in list(self._stage.store.records(labels.KIND_JOB)):
                await self._renew(record.name, record.uid)
            await asyncio.sleep(RENEW_EVERY_S)

    async def _renew(self, name: str, uid: str) -> None:
        status = self._stage.status(name)
        attempt = status.get("attempt")
        wanted = {labels.LABEL_JOB_UID: uid, labels.LABEL_INDEX: "0"}
        pods = (record.manifest["metadata"] for record in self._stage.store.records("Pod"))
        leader = next((pod["name"] for pod in pods if wanted.items() <= pod["labels"].items()), None)
        if attempt is None or status.get("completedAt") or leader is None:
            return
        step = self._steps[uid] = max(self._steps.get(uid, 0), int(status.get("step", 0))) + STEPS_EACH
        said: dict[str, Any] = {"phase": "Training"}
        if saved := step // CHECKPOINT_EVERY * CHECKPOINT_EVERY:
            said["checkpoint"] = {"attempt": attempt["number"], "step": saved}
        if name in self.done:
            said = {"phase": "Done", "outcome": "Succeeded"}
        elif attempt["desired"] == "Stop":
            said |= {"outcome": "Stopped"}
        try:
            await self._stage.report(
                name,
                uid,
                attempt=attempt["number"],
                replacement=int(leader.rpartition("-")[2]),
                joined=attempt["replicas"],
                step=step,
                steps=10_000,
                stepSeconds=0.5,
                loss=2.5,
                **said,
            )
        except NotFoundError:
            return
