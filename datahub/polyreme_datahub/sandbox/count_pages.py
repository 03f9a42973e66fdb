"""Counts a document's pages for a source's listing, in a sandbox: a PDF is input like any other."""

from __future__ import annotations

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SampleTask, SandboxStep, StepMade, StepVerdict

STEP = SandboxStep(name="count-pdf-pages", operation="count-pdf-pages", inputs=(RECORD,))


class PageCounter:
    """Counts pages of many documents in one child; close it after the last."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._sandbox = Sandbox([STEP], limits)

    def count(self, data: bytes) -> int:
        """Count the pages of a document.

        Raises:
            BadRecordError: If it is no PDF, needs a password, or breaks a rule of the sandbox.
            EnvironmentFailedError: If the child is killed from outside again and again.
        """
        blob = Blob(data)
        task = SampleTask(key=blob.digest, values={RECORD: Value.of({"document": blob.digest}, kept=[blob])})
        (outcome,) = self._sandbox.run([task])
        end = outcome.steps[-1]
        if isinstance(end, StepVerdict):
            raise BadRecordError(end.message, rule=end.rule)
        assert isinstance(end, StepMade)
        return int(end.value.data["pages"])

    def close(self) -> None:
        """End the child."""
        self._sandbox.close()
