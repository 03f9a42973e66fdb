"""Small recorded trees of a host, as collectors read them."""

from __future__ import annotations

from pathlib import Path

# The kernel log of Linux 6.5 with NVIDIA's driver 550 (XIDs), 535 (SXIDs) and mlx5_core: facility kern is 0 to 7.
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_31 = "NVRM: Xid (PCI:0000:3b:00): 31, pid=2280636, name=python, Ch 00000008, intr 00000000. MMU Fault"
TO_REBOOT = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
TO_NONE = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
SXID = "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)"
MLX5 = "mlx5_core 0000:05:00.0: poll_health:739:(pid 0): Fatal error 1 detected"


def record(sequence: int, text: str, *, priority: int = 3, at_us: int = 1_000_000) -> str:
    """Return a record of /dev/kmsg."""
    return f"{priority},{sequence},{at_us},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"


def write(root: Path, path: str, text: str) -> None:
    """Write one file below the root."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="ascii")


def kernel_log(root: Path, *records: str) -> None:
    """Write the kernel log."""
    write(root, "dev/kmsg", "".join(records))


def port(root: Path, **counters: str) -> None:
    """Write a port of an adapter, as mlx5_core of Linux 6.5 shows it."""
    folder = "sys/class/infiniband/mlx5_0/ports/1"
    defaults = {"link_downed": "0", "symbol_error": "0", "link_error_recovery": "0"}
    write(root, f"{folder}/state", counters.pop("state", "4: ACTIVE") + "\n")
    for name, value in {**defaults, **counters}.items():
        write(root, f"{folder}/{'hw_counters' if name.startswith('r') else 'counters'}/{name}", value + "\n")


def link(
    root: Path, *, width: str = "16", speed: str = "32.0 GT/s PCIe", vendor: str = "0x10de", kind: str = "0x030200"
) -> None:
    """Write a device below a bridge, as Linux 6.5 shows it."""
    bridge = "sys/devices/pci0000:3a/0000:3a:00.0"
    device = f"{bridge}/0000:3b:00.0"
    for folder in (bridge, device):
        write(root, f"{folder}/max_link_width", "16\n")
        write(root, f"{folder}/max_link_speed", "32.0 GT/s PCIe\n")
    for name, value in (
        ("current_link_width", width),
        ("current_link_speed", speed),
        ("vendor", vendor),
        ("class", kind),
    ):
        write(root, f"{device}/{name}", value + "\n")
    listed = root / "sys/bus/pci/devices/0000:3b:00.0"
    listed.parent.mkdir(parents=True, exist_ok=True)
    if not listed.exists():
        listed.symlink_to(root / device)
