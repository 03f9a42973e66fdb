"""Faults in lines of the kernel log.

Every pattern is anchored at the start of the record's text: a process name may be chosen by a tenant, and drivers print
it later in the line. The formats are those of NVIDIA's driver 535 to 580 (XID), of its nvswitch driver 535 (SXID), of
mlx5_core in Linux 5.15 to 6.8, and of Linux 5.15 to 6.8 itself.
"""

from __future__ import annotations

import re
from typing import Final

from polyreme_agent.findings import Finding, pci_name

STARTS: Final = (
    "NVRM: Xid",
    "nvidia-nvswitch",
    "mlx5_core ",
    "INFO: task ",
    "watchdog: BUG: soft lockup",
    "BUG: ",
    "Oops: ",
    "Kernel panic",
    "mce: [Hardware Error]",
    "EXT4-fs",
    "XFS (",
    "BTRFS",
    "I/O error, dev ",
    "critical ",
    "blk_update_request: ",
)
"""Beginnings of all lines that can match: nearly all lines of a busy node are refused by these alone."""
_NVLINK5: Final = range(144, 151)
_RECOVERY: Final = 154

_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<pci>[0-9A-Fa-f:.]{7,16})(?: GPU-I:\d{1,3})?(?: GPU-CI:\d{1,3})?\): "
    r"(?P<xid>\d{1,4})(?![0-9])(?P<rest>.*)",
    re.ASCII,
)
"""A GPU that is divided (MIG) adds its instance and compute instance."""
_VERDICT = re.compile(
    r", GPU recovery action changed from 0x[0-9a-f]{1,4} \([^()]+\) to 0x[0-9a-f]{1,4} \((?P<action>[^()]{1,40})\)",
    re.ASCII,
)
_NVLINK5_MILD = re.compile(r", [A-Z0-9_]{1,40}\s+Nonfatal\b", re.ASCII)
_SXID = re.compile(
    r"nvidia-nvswitch\d{1,3}: SXid \(PCI:(?P<pci>[0-9A-Fa-f:.]{7,16})\): \d{1,6}, (?P<severity>Fatal|Non-fatal)\b",
    re.ASCII,
)
_MLX5 = re.compile(
    r"mlx5_core (?P<pci>[0-9a-f:.]{7,16})(?: \S{1,32})?: (?:[a-z0-9_]{1,48}:\d{1,6}:\(pid \d{1,10}\): )?(?P<rest>.*)",
    re.ASCII,
)
_MLX5_FAULT = re.compile(
    r"Fatal error \d+ detected|device's health compromised|health poll failed|"
    r"[A-Z0-9_]{1,48}\(0x[0-9a-f]{1,4}\).{0,40} timeout\. Will cause a leak of a command resource|cmd_exec timeout",
    re.ASCII,
)
_OTHERS: Final = (
    ("HungTask", "", re.compile(r"INFO: task .{1,64}:\d{1,10} blocked for more than \d{1,6} seconds\.")),
    (
        "KernelPanic",
        "",
        re.compile(r"watchdog: BUG: soft lockup - CPU#\d|BUG: (?:unable to handle|kernel NULL)|Oops: |Kernel panic - "),
    ),
    ("MachineCheck", "", re.compile(r"mce: \[Hardware Error\]: (?:CPU|Machine check)")),
    (
        "ReadonlyFilesystem",
        "disk",
        re.compile(r"EXT4-fs \((?P<disk>[\w.-]{1,32})\): Remounting filesystem read-only", re.ASCII),
    ),
    (
        "ReadonlyFilesystem",
        "disk",
        re.compile(r"XFS \((?P<disk>[\w.-]{1,32})\): .{0,80}Shutting down filesystem", re.ASCII),
    ),
    (
        "ReadonlyFilesystem",
        "disk",
        re.compile(r"BTRFS.{0,16} \(device (?P<disk>[\w.-]{1,32})(?::? state \w{1,16})?\): forced readonly", re.ASCII),
    ),
    ("DiskError", "disk", re.compile(r"EXT4-fs error \(device (?P<disk>[\w.-]{1,32})\)", re.ASCII)),
    (
        "DiskError",
        "disk",
        re.compile(
            r"(?:blk_update_request: )?(?:critical (?:medium|target)|I/O) error, dev (?P<disk>[\w.-]{1,32}),", re.ASCII
        ),
    ),
)


def finding_of(text: str, *, at_s: float, sequence: int) -> Finding | None:
    """Return the fault that a record of facility kern reports; None if it reports none."""
    if not text.startswith(STARTS):
        return None
    if text.startswith("NVRM"):
        return _xid(text, at_s, sequence)
    if text.startswith("nvidia-nvswitch"):
        found = _SXID.match(text)
        if found is None:
            return None
        code = "SxidFatal" if found["severity"] == "Fatal" else "SxidNonFatal"
        return Finding(code=code, device=pci_name(found["pci"]), at_s=at_s, sequence=sequence)
    if text.startswith("mlx5_core"):
        found = _MLX5.match(text)
        if found is None or _MLX5_FAULT.match(found["rest"]) is None:
            return None
        return Finding(code="HcaFault", device=pci_name(found["pci"]), at_s=at_s, sequence=sequence)
    for code, group, pattern in _OTHERS:
        if (found := pattern.match(text)) is not None:
            return Finding(code=code, device=found[group] if group else "", at_s=at_s, sequence=sequence)
    return None


def _xid(text: str, at_s: float, sequence: int) -> Finding | None:
    found = _XID.match(text)
    if found is None:
        return None
    xid, device = int(found["xid"]), pci_name(found["pci"])
    action, verdict = "", False
    if xid == _RECOVERY and (said := _VERDICT.match(found["rest"])) is not None:
        action, verdict = recovery_action(said["action"]), True
    elif xid in _NVLINK5 and _NVLINK5_MILD.match(found["rest"]) is not None:
        action = "Watch"
    return Finding(code=f"Xid{xid}", device=device, at_s=at_s, sequence=sequence, action=action, verdict=verdict)


def recovery_action(text: str) -> str:
    """Return the action that a driver's recovery text asks for.

    Drivers differ: ``GPU Reset Required`` and ``PF FLR``, ``Node Reboot Required`` and ``OS Reboot``.
    """
    if text == "None":
        return "None"
    if "Reboot" in text:
        return "Reboot"
    return "Reset" if "Reset" in text or "FLR" in text else "Watch"
