"""Metrics of a DCGM exporter: flags are states, counters count by their rise, and a page without GPUs has failed."""

from __future__ import annotations

import pytest

from polyreme_agent.dcgm import Dcgm
from polyreme_agent.findings import State

# dcgm-exporter 3.3.
LABELS = '{gpu="0",UUID="GPU-1b2c",pci_bus_id="00000000:3B:00.0",device="nvidia0",modelName="NVIDIA H100",Hostname="n"}'


def _page(xid: str = "0", pending: int = 0, thermal: int = 5) -> str:
    return (
        "# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.\n"
        f"DCGM_FI_DEV_XID_ERRORS{LABELS} {xid}\n"
        f"DCGM_FI_DEV_ROW_REMAP_PENDING{LABELS} {pending}\n"
        f"DCGM_FI_DEV_THERMAL_VIOLATION{LABELS} {thermal}\n"
    )


def test_flags_are_states_and_counters_count_by_their_rise() -> None:
    pages = [_page(), _page(xid="79"), _page(xid="79", pending=1, thermal=9), _page(xid="-1"), _page(xid="9" * 30)]
    collector = Dcgm(lambda: pages.pop(0), now_s=lambda: 7.0)
    found = [collector.look() for _ in range(5)]
    assert {look.state for look in found} == {State.WORKS}
    assert [[each.code for each in look.occurred] for look in found] == [[], ["Xid79"], ["GPUThermalViolation"], [], []]
    assert [(each.code, each.device) for each in found[2].present] == [("GPURowRemapPending", "0000:3b:00")]


@pytest.mark.parametrize("page", ["", "<html>", "go_goroutines 12\n", "x" * 1_000_000])
def test_a_page_without_gpus_has_failed(page: str) -> None:
    assert Dcgm(lambda: page, now_s=lambda: 7.0).look().state is State.FAILED


def test_an_exporter_that_does_not_answer_has_failed() -> None:
    def away() -> str:
        raise ConnectionRefusedError("refused")

    look = Dcgm(away, now_s=lambda: 7.0).look()
    assert (look.state, look.why) == (State.FAILED, "the DCGM exporter can't be read: refused")
