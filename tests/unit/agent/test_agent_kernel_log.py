"""The kernel log: only the kernel's own records count, each once, and only what starts like a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_agent.findings import State
from polyreme_agent.kernel_lines import finding_of
from polyreme_agent.kernel_log import KernelLog
from polyreme_api.faults.table import fault_table
from tests.unit.agent.host_tree import MLX5, SXID, TO_NONE, TO_REBOOT, XID_31, XID_79, kernel_log, record

# NVIDIA's page on memory errors of the A100 with MIG.
MIG_94 = "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No"
COMMAND = "mlx5_core 0000:03:00.0: wait_func:1015:(pid 29): ACCESS_REG(0x805)"


@pytest.mark.parametrize(
    ("text", "code", "device", "action"),
    [
        (XID_79, "Xid79", "0000:3b:00", ""),
        (XID_31, "Xid31", "0000:3b:00", ""),
        ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "Xid79", "0000:01:00", ""),
        (MIG_94, "Xid94", "0000:01:00", ""),
        (MIG_94.replace("GPU-I:05", "GPU-I:05 GPU-CI:01"), "Xid94", "0000:01:00", ""),
        ("NVRM: Xid (PCI:0000:01:00): 999, a new one", "Xid999", "0000:01:00", ""),
        (TO_REBOOT, "Xid154", "0000:3b:00", "Reboot"),
        (TO_NONE, "Xid154", "0000:3b:00", "None"),
        (TO_REBOOT.replace("Node Reboot Required", "OS Reboot"), "Xid154", "0000:3b:00", "Reboot"),
        (TO_REBOOT.replace("0x2 (Node Reboot Required)", "0x1 (PF FLR)"), "Xid154", "0000:3b:00", "Reset"),
        (TO_REBOOT.replace("Node Reboot Required", "Drain P2P"), "Xid154", "0000:3b:00", "Watch"),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 05", "Xid149", "0018:01:00", ""),
        ("NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP  Nonfatal XC1 i0 Link 05", "Xid145", "0018:01:00", "Watch"),
        (SXID, "SxidFatal", "0000:c3:00", ""),
        (SXID.replace("24007, Fatal", "20009, Non-fatal"), "SxidNonFatal", "0000:c3:00", ""),
        (MLX5, "HcaFault", "0000:05:00", ""),
        (
            f"{COMMAND} timeout. Will cause a leak of a command resource",
            "HcaFault",
            "0000:03:00",
            "",
        ),
        ("INFO: task jbd2/sda1-8:412 blocked for more than 120 seconds.", "HungTask", "", ""),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python:99]", "KernelPanic", "", ""),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "ReadonlyFilesystem", "sda1", ""),
        ("BTRFS info (device nvme0n1p2: state EA): forced readonly", "ReadonlyFilesystem", "nvme0n1p2", ""),
        ("critical medium error, dev sdb, sector 123 op 0x0:(READ)", "DiskError", "sdb", ""),
    ],
)
def test_a_fault_is_read_with_its_device_and_the_drivers_action(text: str, code: str, device: str, action: str) -> None:
    found = finding_of(text, at_s=1.0, sequence=7)
    assert found is not None
    assert (found.code, found.device, found.action, found.sequence) == (code, device, action, 7)
    assert code in {*fault_table(), "Xid999"}, "what follows from a code is in its row"


@pytest.mark.parametrize(
    "text",
    [
        f"python: {XID_79}",
        f" {XID_79}",
        f"audit: comm={XID_79}",
        "NVRM: Xid (PCI:0000:3b:00): 79999, x",
        "NVRM: Xid (PCI:0000:01:00 python): 79, x",
        "NVRM: Xid : 32, pid=2280636",
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Severity 0 Engine instance 60 Sub-engine instance 00",
        "mlx5_core 0000:53:00.0 enp83s0f0np0: Link down",
        "INFO: task Remounting filesystem read-only",
        "",
    ],
)
def test_text_that_a_tenant_can_write_or_that_is_no_fault_is_none(text: str) -> None:
    assert finding_of(text, at_s=1.0, sequence=7) is None


def _log(root: Path) -> KernelLog:
    return KernelLog(root, now_s=lambda: 5_000.0, uptime_s=lambda: 1_000.0)


def test_only_the_kernels_own_records_count_each_once(tmp_path: Path) -> None:
    forged = record(11, XID_79, priority=11)  # facility user: written by a program
    kernel_log(tmp_path, record(10, "usb 1-1: new device"), forged, record(12, XID_79, at_us=600_000_000))
    log = _log(tmp_path)
    look = log.look()
    assert [(each.code, each.sequence, each.at_s) for each in look.occurred] == [("Xid79", 12, 4_600.0)]
    assert (log.read, log.foreign, log.lost) == (3, 1, 0)
    log.close()
    kernel_log(tmp_path, record(12, XID_79), record(20, MLX5))
    look = log.look()
    assert [each.code for each in look.occurred] == ["HcaFault"]
    assert (log.lost, look.why) == (7, "4 or more records were overwritten unread")
    log.close()


def test_a_log_that_is_not_there_has_failed(tmp_path: Path) -> None:
    look = _log(tmp_path).look()
    assert look.state is State.FAILED
    assert "dev/kmsg can't be opened: No such file" in look.why
