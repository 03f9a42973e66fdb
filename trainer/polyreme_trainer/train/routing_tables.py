"""Routing of tokens since the last save, by layer and expert: one object per attempt, rewritten at each save.

::

    {"attempt", "fromStep", "step",
     "layers": [{"layer", "tokens", "entropy", "load": [...], "dropped": [...]}]}

``load`` and ``dropped`` are rows of each expert, summed over all ranks and steps from ``fromStep`` to ``step``;
``entropy`` is the mean of the tokens' [nats]. The step log has three numbers of it per step; this has all of it, and
does not grow with the run. The job's Lease has the newest step's numbers by layer, without experts.

Legend: M layers with experts, X numbers about the routing of one.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from polyreme_api.history import routing_key
from polyreme_api.progress import LAYERS_MAX, RoutingByLayer
from polyreme_api.store import ObjectStore
from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.routing import Routing

DECIMALS = 4
"""Most layers that are reported while a run trains."""


class RoutingTable:
    """Sums up the steps of a window; kept by rank 0."""

    def __init__(self, store: ObjectStore, shape: DecoderShape, *, attempt: int) -> None:
        self._store = store
        self._shape = shape
        self._attempt = attempt
        self._from_step = 0
        self._sum_MX: Tensor | None = None

    def add(self, routing_MX: Tensor, *, step: int) -> None:
        """Add a step's numbers, summed over all ranks, in host memory."""
        numbers_MX = routing_MX.double()
        if self._sum_MX is None:
            self._from_step, self._sum_MX = step, numbers_MX.clone()
        else:
            self._sum_MX += numbers_MX

    def reportable(self, routing_MX: Tensor) -> RoutingByLayer | None:
        """Return the numbers of a step that are reported during training; None if there are no layers, or too many."""
        if not 0 < routing_MX.shape[0] <= LAYERS_MAX:
            return None
        of = Routing.from_numbers(routing_MX)
        layers = of.by_layer(experts_per_token=self._shape.experts_per_token)
        return RoutingByLayer(
            first_layer=self._shape.dense_layers,
            load_max=tuple(round(fullest, DECIMALS) for fullest, _, _ in layers),
            entropy=tuple(round(entropy, DECIMALS) for _, entropy, _ in layers),
            dropped=tuple(dropped for _, _, dropped in layers),
        )

    def write(self, *, step: int) -> None:
        """Write the window that ends with a step, and begin the next one.

        Raises:
            StoreFailedError: If the store does not take it.
        """
        if self._sum_MX is None:
            return
        layers = self._layers(Routing.from_numbers(self._sum_MX))
        table = {"attempt": self._attempt, "fromStep": self._from_step, "step": step, "layers": layers}
        self._store.put(routing_key(self._attempt), json.dumps(table).encode())
        self._sum_MX = None

    def _layers(self, of: Routing) -> list[dict[str, Any]]:
        found = []
        for place, (load_E, dropped_E, entropy) in enumerate(
            zip(of.load_LE.long().tolist(), of.dropped_LE.long().tolist(), of.entropy_L.tolist(), strict=True)
        ):
            tokens = sum(load_E) // self._shape.experts_per_token
            found.append(
                {
                    "layer": self._shape.dense_layers + place,
                    "tokens": tokens,
                    "entropy": entropy / tokens if tokens else 0.0,
                    "load": load_E,
                    "dropped": dropped_E,
                }
            )
        return found
