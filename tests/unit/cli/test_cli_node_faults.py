"""Faults of nodes that checks before training find: ``--inject slow-node=1``."""

from __future__ import annotations

import pytest

from polyreme.local_run.fault_options import NODE_FAULTS, check_injection, parse_injection
from polyreme_api.errors import InvalidConfigError


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_a_fault_of_a_node_is_read_and_written_without_a_step(fault: str) -> None:
    injection = parse_injection(f"{fault}=3")
    assert (injection.of_node, injection.target, str(injection)) == (True, 3, f"{fault}=3")
    check_injection(injection, ranks=4, workers=4, steps=9, nodes=5, checks=True)
    with pytest.raises(InvalidConfigError, match="not a fault"):
        parse_injection(f"{fault}=3@7")


def test_a_fault_that_no_check_would_find_is_refused() -> None:
    injection = parse_injection("slow-node=5")
    with pytest.raises(InvalidConfigError, match="there is no node 5, expected 0 to 4"):
        check_injection(injection, ranks=4, workers=4, steps=9, nodes=5, checks=True)
    with pytest.raises(InvalidConfigError, match="the job checks no nodes, expected true") as refused:
        check_injection(injection, ranks=4, workers=4, steps=9, nodes=9)
    assert refused.value.field == "spec.preChecks.enabled"
