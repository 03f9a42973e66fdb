"""Failures on purpose: ``--inject kill-rank=1@130`` kills rank 1 with SIGKILL once step 130 is trained.

Faults of a node are found by its checks before training, so they have no step: ``--inject slow-node=1``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from polyreme_api.errors import InvalidConfigError

FORMS = (
    "kill-rank=RANK@STEP, stop-rank=RANK@STEP, kill-launcher=INDEX@STEP, slow-node=NODE, wrong-node=NODE, "
    "hanging-node=NODE or slow-network=NODE"
)
Fault = Literal["kill-rank", "stop-rank", "kill-launcher", "slow-node", "wrong-node", "hanging-node", "slow-network"]
NODE_FAULTS: dict[Fault, str] = {
    "slow-node": "slow",
    "wrong-node": "wrong",
    "hanging-node": "hangs",
    "slow-network": "slow-network",
}
"""Faults that a node's checks find, with their names in ``POLYREME_CHECK_FAULT``."""

_FORM = re.compile(r"^(kill-rank|stop-rank|kill-launcher)=(\d{1,6})@(\d{1,9})$")
_NODE_FORM = re.compile(rf"^({'|'.join(NODE_FAULTS)})=(\d{{1,4}})$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault: what, to whom, after which step."""

    fault: Fault
    target: int
    """Rank, for ``kill-launcher`` the worker index, or the number of a node, from 0."""
    step: int
    """Newest trained step at which it strikes; 0 for a fault of a node."""

    def __str__(self) -> str:
        """Write it as the flag takes it."""
        return f"{self.fault}={self.target}" + ("" if self.of_node else f"@{self.step}")

    @property
    def of_node(self) -> bool:
        """Whether it is a fault of a node."""
        return self.fault in NODE_FAULTS


def check_injection(
    injection: Injection, *, ranks: int, workers: int, steps: int, nodes: int = 1, checks: bool = False
) -> None:
    """Refuse a fault that can never strike, since the job has no such rank, worker or step, or checks no node.

    Raises:
        InvalidConfigError: Naming the bound.
    """
    what, targets = ("index", workers) if injection.fault == "kill-launcher" else ("rank", ranks)
    if injection.of_node:
        _check_node_fault(injection, nodes=nodes, checks=checks)
        return
    if injection.target >= targets:
        wrong = f"the job has no {what} {injection.target}, expected 0 to {targets - 1}"
    elif injection.step > steps:
        wrong = f"the job has no step {injection.step}, expected 0 to {steps}"
    else:
        return
    raise InvalidConfigError(f"fault {injection} would never be injected: {wrong}", field="--inject")


def _check_node_fault(injection: Injection, *, nodes: int, checks: bool) -> None:
    if not checks:
        wrong, field = "the job checks no nodes, expected true", "spec.preChecks.enabled"
    elif injection.target >= nodes:
        wrong, field = f"there is no node {injection.target}, expected 0 to {nodes - 1}", "--nodes or --inject"
    else:
        return
    raise InvalidConfigError(f"fault {injection} would never be injected: {wrong}", field=field)


def parse_injection(text: str) -> Injection:
    """Read a flag's value.

    Raises:
        InvalidConfigError: If it has another form.
    """
    if (of_node := _NODE_FORM.match(text)) is not None:
        return Injection(fault=of_node[1], target=int(of_node[2]), step=0)  # type: ignore[arg-type]
    if (match := _FORM.match(text)) is None:
        raise InvalidConfigError(
            f"not a fault: {text!r}, expected {FORMS}",
            field="--inject",
        )
    fault: Fault = match[1]  # type: ignore[assignment]
    return Injection(fault=fault, target=int(match[2]), step=int(match[3]))
