"""A rank that the kernel killed for memory is reported as such where the container's control group shows it."""

from pathlib import Path

import pytest

from polyreme_launcher.memory_kills import MemoryKills

V1 = "4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n"
V2 = "0::{path}\n"
EVENTS = "low 0\nhigh 3\nmax 12\noom 1\noom_kill {count}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
ONE = "the kernel killed 1 process of its container for want of memory"


def write(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        (V2.format(path="/"), "sys/fs/cgroup/memory.events", EVENTS),
        (V2.format(path="/user.slice/x"), "sys/fs/cgroup/user.slice/x/memory.events", EVENTS),
        (V2.format(path="/kubepods/pod1/c"), "sys/fs/cgroup/memory.events", EVENTS),
        (V1.format(path="/"), "sys/fs/cgroup/memory/memory.oom_control", CONTROL),
        (V1.format(path="/kubepods/pod1/c"), "sys/fs/cgroup/memory/memory.oom_control", CONTROL),
        (V1.format(path="/a"), "sys/fs/cgroup/memory/a/memory.oom_control", CONTROL),
    ],
    ids=["v2", "v2 path", "v2 without a namespace", "v1", "v1 without a namespace", "v1 path"],
)
def test_kills_since_the_last_look_are_counted_once(tmp_path: Path, groups: str, file: str, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, file, text.format(count=2))
    kills = MemoryKills(tmp_path)
    assert kills.explain() == ""
    write(tmp_path, file, text.format(count=3))
    assert kills.explain() == ONE
    assert kills.explain() == ""
    write(tmp_path, file, text.format(count=5))
    assert kills.explain() == ONE.replace("1 process", "2 processes")


@pytest.mark.parametrize("text", ["", "oom_kill many\n", "oom 1\n"])
def test_nothing_is_said_without_a_counter(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", V2.format(path="/"))
    write(tmp_path, "sys/fs/cgroup/memory.events", text)
    assert MemoryKills(tmp_path).explain() == ""
    assert MemoryKills(tmp_path / "nowhere").explain() == ""
