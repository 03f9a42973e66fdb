"""Links and ports in sysfs: what is missing is absent, impossible counters are reported, only a rise is a fault."""

from __future__ import annotations

from pathlib import Path

from polyreme_agent.findings import State
from polyreme_agent.infiniband import InfiniBand
from polyreme_agent.pci import PcieLinks
from tests.unit.agent.host_tree import link, port


class _Ports:
    def __init__(self, root: Path) -> None:
        self.now_s = 100.0
        self.collector = InfiniBand(root, now_s=lambda: 5_000.0, uptime_s=lambda: self.now_s)

    def codes(self) -> list[str]:
        self.now_s += 10.0
        look = self.collector.look()
        return [each.code for each in (*look.present, *look.occurred)]


def test_a_node_without_hardware_is_absent(tmp_path: Path) -> None:
    assert InfiniBand(tmp_path, now_s=lambda: 0.0, uptime_s=lambda: 0.0).look().state is State.ABSENT
    assert PcieLinks(tmp_path).look().state is State.ABSENT


def test_a_port_fails_by_what_rose_since_the_look_before(tmp_path: Path) -> None:
    ports = _Ports(tmp_path)
    port(tmp_path, link_downed="7", symbol_error="50000")
    assert ports.codes() == []
    port(tmp_path, link_downed="8", symbol_error="50099")
    assert ports.codes() == ["LinkDowned"]
    port(tmp_path, link_downed="8", symbol_error="50300", link_error_recovery="1")
    assert ports.codes() == ["LinkFlap", "SymbolErrors"]
    port(tmp_path, link_downed="0", state="1: DOWN")
    assert ports.codes() == ["PortDown"]


def test_impossible_counters_are_reported_and_count_nothing(tmp_path: Path) -> None:
    ports = _Ports(tmp_path)
    port(tmp_path)
    assert ports.codes() == []
    for value in ("-1", "1e9", str(2**64), "many"):
        port(tmp_path, link_downed=value)
        look = ports.collector.look()
        assert look.state is State.FAILED
        assert f"impossible value '{value}'" in look.why
        assert not look.occurred


def test_an_adapter_that_is_gone_is_lost(tmp_path: Path) -> None:
    ports = _Ports(tmp_path)
    port(tmp_path)
    assert ports.codes() == []
    (tmp_path / "sys/class/infiniband/mlx5_0").rename(tmp_path / "gone")
    assert ports.codes() == ["HcaLost"]


def test_a_link_is_judged_by_both_of_its_ends(tmp_path: Path) -> None:
    links = PcieLinks(tmp_path)
    link(tmp_path, speed="2.5 GT/s PCIe")
    assert links.gpus() == 1
    assert links.look().present == ()  # an idle GPU lowers its speed
    link(tmp_path, width="8")
    assert [(each.code, each.device) for each in links.look().present] == [("PCIeWidth", "0000:3b:00")]
    link(tmp_path, vendor="0x15b3", kind="0x020700", speed="8.0 GT/s PCIe")
    assert [each.code for each in links.look().present] == ["PCIeSpeed"]
    link(tmp_path, width="255")
    assert links.look().state is State.ABSENT
