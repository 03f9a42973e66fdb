"""The ledger: sources merge, the driver's verdict outranks the table, and what is not examined is not healthy."""

from __future__ import annotations

import pytest

from polyreme_agent.findings import Finding, Look, State
from polyreme_agent.kernel_lines import finding_of
from polyreme_agent.ledger import ENTRIES_MAX, HOLD_S, Condition, Ledger
from polyreme_api.faults.table import fault_table
from polyreme_api.node_report import CONDITION_PREFIX, MESSAGE_CHARACTERS_MAX, NodeEvent, decode
from tests.unit.agent.host_tree import TO_NONE, TO_REBOOT, XID_31, XID_79

BOOT = "3f1c2b7e-0000-4000-8000-000000000001"
GPU = "0000:3b:00"


class _Node:
    def __init__(self) -> None:
        self.ledger = Ledger(fault_table(), boot=BOOT)
        self.now_s = 1_000.0

    def kernel(self, *lines: str) -> None:
        found = (finding_of(line, at_s=self.now_s, sequence=number) for number, line in enumerate(lines, start=1))
        self.put("kernel-log", *(each for each in found if each is not None))

    def put(
        self, collector: str, *occurred: Finding, present: tuple[Finding, ...] = (), state: State = State.WORKS
    ) -> None:
        self.ledger.put(collector, Look(state=state, occurred=occurred, present=present, why="why"), self.now_s)

    def condition(self, name: str) -> Condition:
        found = {each.type: each for each in self.ledger.conditions(self.now_s)}
        return found[CONDITION_PREFIX + name]

    def events(self, name: str = "GPU") -> list[tuple[str, int, str]]:
        return [(each.code, each.count, each.action) for each in decode(self.condition(name).message)[0]]


def test_nothing_is_healthy_that_was_not_examined() -> None:
    node = _Node()
    assert {each.status for each in node.ledger.conditions(0.0)[:-1]} == {"Unknown"}
    node.put("nvml", state=State.ABSENT)
    node.put("infiniband", state=State.FAILED)
    node.put("kernel-log")
    assert (node.condition("GPU").status, node.condition("GPU").reason) == ("Unknown", "Absent")
    assert (node.condition("Network").status, node.condition("Network").reason) == ("Unknown", "Failed")
    assert node.condition("Storage").status == "False"
    heartbeat = node.condition("Agent")
    assert (heartbeat.status, heartbeat.reason) == ("True", "CollectorFailed")
    assert heartbeat.message.startswith("Collectors: infiniband failed, kernel-log works, nvml absent; infiniband: why")


def test_the_same_xid_from_kernel_log_nvml_and_dcgm_is_one_event() -> None:
    node = _Node()
    node.kernel(XID_79)
    node.put("nvml", Finding(code="Xid79", device=GPU, at_s=1_000.2))
    node.put("dcgm", Finding(code="Xid79", device=GPU, at_s=1_004.0))
    assert node.events() == [("Xid79", 1, "")]
    assert node.condition("GPU").reason == "Xid79"
    assert node.condition("GPU").message.startswith(f"{GPU}: GPU has fallen off the bus (Xid79)\n")


def test_the_drivers_verdict_outranks_the_table_and_ends_the_fault() -> None:
    node = _Node()
    node.kernel(XID_31, TO_REBOOT)
    assert node.events()[0] == ("Xid154", 1, "Reboot")
    assert ("Xid31", 1, "Reboot") in node.events()
    node.now_s += 10 * HOLD_S
    assert ("Xid31", 1, "Reboot") in node.events()
    node.ledger.put("kernel-log", Look(state=State.WORKS, occurred=(_found(TO_NONE, node.now_s),)), node.now_s)
    assert node.events() == []
    node.kernel(XID_79)
    node.now_s += HOLD_S / 2
    verdict = Finding(code="GPURecoveryAction", device=GPU, action="Reset", verdict=True)
    node.ledger.put("nvml", Look(state=State.WORKS, verdicts=(verdict,)), node.now_s)
    assert node.events() == [("Xid79", 1, "Reset")]


def _verdict(action: str, at_s: float) -> Finding:
    return Finding(code="GPURecoveryAction", device=GPU, at_s=at_s, action=action, verdict=True)


def test_what_the_driver_said_before_a_fault_does_not_cover_it() -> None:
    node = _Node()
    content = Look(state=State.WORKS, verdicts=(_verdict("None", node.now_s),))
    node.ledger.put("nvml", content, node.now_s)
    node.now_s += 2
    node.kernel(XID_79)
    assert node.events() == [("Xid79", 1, "")]
    node.ledger.put("nvml", content, node.now_s + 1)  # the answer is older than the fault
    node.now_s += 2 * HOLD_S
    assert node.events() == [("Xid79", 1, "")]
    node.ledger.put("nvml", Look(state=State.WORKS, verdicts=(_verdict("None", node.now_s),)), node.now_s)
    assert node.events() == []


def test_a_content_driver_does_not_end_what_asks_for_a_replacement() -> None:
    node = _Node()
    present = (Finding(code="GPURowRemapFailed", device=GPU),)
    node.ledger.put(
        "nvml", Look(state=State.WORKS, present=present, verdicts=(_verdict("None", node.now_s),)), node.now_s
    )
    assert node.events() == [("GPURowRemapFailed", 1, "")]


def test_a_driver_that_asks_for_an_action_without_an_xid_is_a_fault_until_it_is_content() -> None:
    node = _Node()
    node.ledger.put("nvml", Look(state=State.WORKS, verdicts=(_verdict("Reboot", node.now_s),)), node.now_s)
    assert node.events() == [("GPURecoveryAction", 1, "Reboot")]
    node.now_s += 5
    node.ledger.put("nvml", Look(state=State.WORKS, verdicts=(_verdict("None", node.now_s),)), node.now_s)
    assert node.condition("GPU").status == "False"


def _found(line: str, at_s: float) -> Finding:
    found = finding_of(line, at_s=at_s, sequence=99)
    assert found is not None
    return found


def test_time_ends_only_faults_that_ask_for_no_repair() -> None:
    node = _Node()
    node.put("nvml")
    node.kernel(XID_31, XID_79, "NVRM: Xid (PCI:0000:3b:00): 999, unknown")
    assert [code for code, _, _ in node.events()] == ["Xid79", "Xid31", "Xid999"]
    node.now_s += HOLD_S
    assert [code for code, _, _ in node.events()] == ["Xid79"]


def test_a_state_ends_when_it_is_gone_and_not_when_its_collector_fails() -> None:
    node = _Node()
    missing = Finding(code="GPUMissing", text="7 of 8 GPUs answer")
    node.put("nvml", present=(missing,))
    assert "7 of 8 GPUs answer" in node.condition("GPU").message
    node.put("nvml", state=State.FAILED)
    assert node.condition("GPU").reason == "GPUMissing"
    node.put("nvml")
    assert node.condition("GPU").status == "False"


def test_after_a_restart_faults_of_this_boot_are_still_there_and_counted_once() -> None:
    node = _Node()
    node.kernel(XID_79)
    known = decode(node.condition("GPU").message)[0]
    for replay in (True, False):
        again = _Node()
        if replay:
            again.kernel(XID_79)
        again.ledger.restore(known)
        if not replay:
            again.kernel(XID_79)
        assert again.events() == [("Xid79", 1, "")]
    booted = _Node()
    booted.ledger.restore([NodeEvent(code="Xid79", device=GPU, boot="another", sequence=1)])
    assert booted.events() == []


def test_counts_are_of_the_window_of_their_row() -> None:
    node = _Node()
    hung = "INFO: task kworker/0:1:12 blocked for more than 120 seconds."
    node.kernel(hung, hung.replace("12 b", "13 b"))
    assert node.events("Kernel") == [("HungTask", 2, "")]
    node.now_s += HOLD_S
    assert node.condition("Kernel").status == "False"
    known = [NodeEvent(code="HungTask", count=2, last_s=1_000, boot=BOOT, sequence=2)]
    restarted, replayed = _Node(), _Node()
    replayed.kernel(hung, hung)
    for each in (restarted, replayed):
        each.ledger.restore(known)
    for each in (node, restarted, replayed):
        each.now_s = 1_000.0 + HOLD_S
        each.put("kernel-log", Finding(code="HungTask", at_s=each.now_s, sequence=3))
        assert each.events("Kernel") == [("HungTask", 3, "")]


def test_an_occurrence_that_two_collectors_report_counts_once_in_its_window() -> None:
    node = _Node()
    for collector in ("nvml", "dcgm"):
        node.put(collector, Finding(code="GPUThermalViolation", device=GPU, at_s=node.now_s))
    assert node.events() == [("GPUThermalViolation", 1, "")]


@pytest.mark.parametrize("at_s", [9e18, float("inf"), -5.0])
def test_floods_and_impossible_times_stay_within_bounds(at_s: float) -> None:
    node = _Node()
    flood = tuple(
        Finding(code="Xid79", device=f"0000:{number:02x}:00", at_s=at_s, count=10**18)
        for number in range(4 * ENTRIES_MAX)
    )
    node.put("kernel-log", *flood)
    condition = node.condition("GPU")
    assert len(condition.message) <= MESSAGE_CHARACTERS_MAX
    assert all(event.last_s <= node.now_s for event in decode(condition.message)[0])
    assert node.ledger.dropped == 3 * ENTRIES_MAX
    assert f"{3 * ENTRIES_MAX} faults did not fit" in node.condition("Agent").message
