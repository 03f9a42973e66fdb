"""Failures on purpose: ``--inject kill-rank=1@130`` kills rank 1 with SIGKILL once step 130 is trained."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from polyreme_api.errors import InvalidConfigError

FORMS = "kill-rank=RANK@STEP, stop-rank=RANK@STEP or kill-launcher=INDEX@STEP"
Fault = Literal["kill-rank", "stop-rank", "kill-launcher"]

_FORM = re.compile(r"^(kill-rank|stop-rank|kill-launcher)=(\d{1,6})@(\d{1,9})$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault: what, to whom, after which step."""

    fault: Fault
    target: int
    """Rank, or for ``kill-launcher`` the worker index."""
    step: int
    """Newest trained step at which it strikes."""

    def __str__(self) -> str:
        """Write it as the flag takes it."""
        return f"{self.fault}={self.target}@{self.step}"


def check_injection(injection: Injection, *, ranks: int, workers: int, steps: int) -> None:
    """Refuse a fault that can never strike, since the job has no such rank, worker or step.

    Raises:
        InvalidConfigError: Naming the bound.
    """
    what, targets = ("index", workers) if injection.fault == "kill-launcher" else ("rank", ranks)
    if injection.target >= targets:
        wrong = f"the job has no {what} {injection.target}, expected 0 to {targets - 1}"
    elif injection.step > steps:
        wrong = f"the job has no step {injection.step}, expected 0 to {steps}"
    else:
        return
    raise InvalidConfigError(f"fault {injection} would never be injected: {wrong}", field="--inject")


def parse_injection(text: str) -> Injection:
    """Read a flag's value.

    Raises:
        InvalidConfigError: If it has another form.
    """
    if (match := _FORM.match(text)) is None:
        raise InvalidConfigError(
            f"not a fault: {text!r}, expected {FORMS}",
            field="--inject",
        )
    fault: Fault = match[1]  # type: ignore[assignment]
    return Injection(fault=fault, target=int(match[2]), step=int(match[3]))
