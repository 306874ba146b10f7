"""What is left of the memory of a machine and its control groups, from files as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgpu.errors import NotEnoughMemory
from flowgpu.host import memory

MIB = 1 << 20
AVAILABLE = 900 * MIB


class Machine:
    """A /proc, and control groups below a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.groups = folder / "proc", folder / "groups"
        (self.proc / "self").mkdir(parents=True)
        text = f"MemTotal:  9999999 kB\nMemAvailable:   {AVAILABLE >> 10} kB\n"
        (self.proc / "meminfo").write_text(text)
        self.is_in("")
        self.mounts()

    def is_in(self, groups: str) -> None:
        (self.proc / "self" / "cgroup").write_text(groups)

    def mounts(self, kind: str = "", options: str = "rw", root: str = "/") -> None:
        lines = ["22 1 0:20 / /proc rw - proc proc rw"]
        if kind:
            lines.append(f"30 1 0:26 {root} {self.groups} rw shared:4 - {kind} none {options}")
        (self.proc / "self" / "mountinfo").write_text("\n".join(lines) + "\n")

    def group(self, path: str, **files: object) -> Path:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")
        return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(memory, "PROC", made.proc)
    return made


def test_without_groups_it_is_the_machine_s(machine: Machine) -> None:
    assert memory.left() == (AVAILABLE, "the machine")
    memory.need(AVAILABLE, "nothing")
    with pytest.raises(NotEnoughMemory, match=r"the machine has 900 MiB .*, and a dump needs 901"):
        memory.need(AVAILABLE + MIB, "a dump")


def test_the_second_version_of_the_interface(machine: Machine) -> None:
    machine.is_in("0::/job/step\n")
    machine.mounts("cgroup2")
    stat = f"anon 5\ninactive_file {3 * MIB}\nactive_file {MIB}\nslab_reclaimable {MIB}\n"
    step = machine.group("job/step", max=100 * MIB, current=40 * MIB, stat=stat)
    assert memory.left() == (65 * MIB, f"{step}")
    # What holds a group holds it as well.
    job = machine.group("job", max=50 * MIB, current=45 * MIB, stat="anon 5\n")
    assert memory.left() == (5 * MIB, f"{job}")
    machine.group("job", max="max")
    machine.group("job/step", max="max")
    assert memory.left() == (AVAILABLE, "the machine")


def test_the_first_version_of_the_interface(machine: Machine) -> None:
    machine.is_in("5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/another\n")
    machine.mounts("cgroup", "rw,memory")
    none = 9223372036854771712
    machine.group("", limit_in_bytes=none, usage_in_bytes=400 * MIB, stat="total_active_file 0\n")
    stat = f"inactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    job = machine.group("job", limit_in_bytes=64 * MIB, usage_in_bytes=60 * MIB, stat=stat)
    assert memory.left() == (7 * MIB, f"{job}")
    machine.mounts("cgroup", "rw,cpu,cpuacct")
    assert memory.left() == (AVAILABLE, "the machine")


def test_a_container_sees_its_group_as_the_outermost(machine: Machine) -> None:
    machine.is_in("0::/pods/one/inner\n")
    machine.mounts("cgroup2", root="/pods/one")
    own = machine.group("", max=30 * MIB, current=20 * MIB, stat="anon 5\n")
    assert memory.left() == (10 * MIB, f"{own}")
    assert [group for group, _ in memory.groups()] == [own / "inner", own]
    machine.mounts("cgroup2", root="/pods/another")
    assert memory.left() == (AVAILABLE, "the machine")


def test_what_the_kernel_does_not_say_is_no_reason_to_refuse(machine: Machine) -> None:
    (machine.proc / "self" / "cgroup").unlink()
    assert memory.left() == (AVAILABLE, "the machine")
    (machine.proc / "meminfo").write_text("MemTotal: 9999999 kB\n")
    memory.need(1 << 60, "a dump")
    (machine.proc / "meminfo").unlink()
    memory.need(1 << 60, "a dump")


def test_more_than_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.is_in("0::/\n")
    machine.mounts("cgroup2")
    machine.group("", max=MIB, current=5 * MIB, stat="anon 5\n")
    with pytest.raises(NotEnoughMemory, match=r"has 0 .* of memory left"):
        memory.need(MIB, "a dump")
