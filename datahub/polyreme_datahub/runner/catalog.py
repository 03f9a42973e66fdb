"""Flows by their id: a worker learns from the registry what the items of a flow are about."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from polyreme_api.errors import NotFoundError
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.recipes.recipe import Step, build_recipe
from polyreme_datahub.registry import datasets, flows
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.pool import Handler
from polyreme_datahub.runner.stored import digests_of

FLOWS_MAX = 4
"""Flows whose handlers, and their child processes, one thread keeps."""


def describe(flow: Flow) -> dict[str, Any]:
    """Describe a flow so that another process can run it; blobs of shared values lie in the lakehouse."""
    return {
        "versions": sorted(flow.versions),
        "shared": {
            name: {"data": dict(value.data), "blobs": sorted(value.blobs)} for name, value in flow.shared.items()
        },
        "steps": [
            {
                "step": step.name,
                "operation": step.operation.path,
                "device": step.operation.device,
                "inputs": list(step.inputs),
                "parameters": dataclasses.asdict(step.parameters),
            }
            for step in flow.recipe.steps
        ],
    }


def load_flow(context: RunContext, flow: str) -> Flow:
    """Return a flow with its shared values.

    Raises:
        NotFoundError: If the registry has no such flow.
        InvalidConfigError: If one of its operations can't be imported here.
    """
    body = flows.find_flow(context.database, flow)
    if body is None:
        raise NotFoundError(f"no flow {flow} in the registry: its work items can't be done")
    shared = {
        name: Value(
            data=value["data"], blobs={digest: Blob(context.lakehouse.get_blob(digest)) for digest in value["blobs"]}
        )
        for name, value in body["shared"].items()
    }
    steps: list[Step] = []
    for entry in body["steps"]:
        operation = find_operation(entry["operation"])
        parameters = operation.parse_parameters(json.loads(json.dumps(entry["parameters"])))
        steps.append(
            Step(name=entry["step"], operation=operation, parameters=parameters, inputs=tuple(entry["inputs"]))
        )
    versions = {number: datasets.version_of(context.database, number) for number in body["versions"]}
    return Flow(recipe=build_recipe(steps, constants=digests_of(shared)), versions=versions, shared=shared)


class CatalogHandler:
    """Does items of any flow; one object for each thread.

    Args:
        context: What work needs of its process.
        handler: Makes the handler of one flow.
    """

    def __init__(self, context: RunContext, handler: Callable[[Flow], Handler]) -> None:
        self._context, self._handler = context, handler
        self._handlers: OrderedDict[str, Handler] = OrderedDict()

    def do(self, item: WorkItem) -> None:
        """Do an item to its end."""
        if item.flow not in self._handlers:
            while len(self._handlers) >= FLOWS_MAX:
                self._handlers.popitem(last=False)[1].close()
            self._handlers[item.flow] = self._handler(load_flow(self._context, item.flow))
        self._handlers.move_to_end(item.flow)
        self._handlers[item.flow].do(item)

    def close(self) -> None:
        """End what the handlers started."""
        while self._handlers:
            self._handlers.popitem()[1].close()
