"""A task comes back after a checkpoint, whatever its program has taken away from itself meanwhile;
or is refused by name while nothing is let go. Real coordinator, real CRIU, emulated GPU.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import AddressSpaceLimited, TaskStopped, Unreachable
from flowgpu.host.proctree import is_stopped
from flowgpu.jobs import Registry
from tests.emu.gpu_job import GPU, said_across_a_restore, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import FLOWGPU, ROOT, flowgpu, runs, runtime_dir
from tests.emu.test_takeover import kill_coordinator

__all__ = ["runs", "runtime_dir"]  # fixtures

# Programs that set their title do so: they write over all that the kernel put above the stack.
TITLE = """
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = (int(stat[at - 3]) for at in (50, 51))  # env_start, env_end
ctypes.memset(start, 0, end - start)
assert not libc.getenv(b"FLOWGPU_SOCKET") or b"/" not in ctypes.string_at(libc.getenv(b"PATH"))
"""
CLEARED = """
os.environ.clear()
libc.clearenv()
"""
# FlowGPU's own: the driver's are sockets of streams.
CLOSED = """
import socket
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if socket.socket(fileno=os.dup(fd)).type == socket.SOCK_SEQPACKET:
            os.close(fd)
    except OSError:
        pass
"""
# All but four: fewer are refused by name.
FEW_DESCRIPTORS = """
import resource
low = sum(int(fd) < 512 for fd in os.listdir("/proc/self/fd")) - 1  # ours are above
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (low + 4, limits[1]))
"""
ENDS = "went()\nprint('gpu', gpu())\n"
TAKEN = {"title": TITLE, "environment": CLEARED, "descriptors": CLOSED, "limit": FEW_DESCRIPTORS}


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("kind", TAKEN)
def test_a_task_comes_back_without_what_it_has_taken_from_itself(
    kind: str, engine: str, tmp_path: Path
) -> None:
    program = GPU + TAKEN[kind] + ENDS
    assert said_across_a_restore(f"back-{kind}", program, tmp_path, engine=engine) == [
        "ready",
        "gpu True",
    ]


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("kind", TAKEN)
def test_so_does_one_that_is_left_running(kind: str, engine: str, tmp_path: Path) -> None:
    program = GPU + TAKEN[kind] + ENDS
    done, said = said_with_a_checkpoint_between(
        f"live-{kind}", engine, program, tmp_path, "", "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    assert said == ["ready", "gpu True"]
    restored = flowgpu("restore", tmp_path / "image")
    assert (restored.returncode, restored.stdout) == (0, "gpu True\n"), restored.stderr


# A filter of seccomp(2) for all threads.
FILTER = """
def forbid(action, *calls):
    code = [(0x20, 0, 0, 0)]
    for call in calls:
        code += [(0x15, 0, 1, call), (0x06, 0, 0, action)]
    code.append((0x06, 0, 0, 0x7fff0000))
    program = b"".join(struct.pack("=HBBI", *one) for one in code)
    held = ctypes.create_string_buffer(program)
    told = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(code), ctypes.addressof(held)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(317, 1, 1, told) == 0
"""
ROOT_FOLDER = """
os.chroot(os.path.dirname(sys.argv[1]))
sys.argv[1] = "/go"
"""
# Without the right to lift it again, which root has.
FEW = """
import resource
libc.prctl(24, 24, 0, 0, 0)
header, none = struct.pack("Ii", 0x20080522, 0), bytearray(24)
held = (ctypes.c_char * 24).from_buffer(none)
assert libc.syscall(125, header, held) == 0
struct.pack_into("I", none, 0, struct.unpack_from("I", none, 0)[0] & ~(1 << 24))
assert libc.syscall(126, header, held) == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
"""
NONE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
LACKS = r"it needs \d+ more descriptors, and \d+ of {} are taken \(`ulimit {}`\)"
REFUSED = {
    "descriptors": (NONE, LACKS.format(3, "-Sn")),
    "more-descriptors": (FEW, LACKS.format(40, "-Hn")),
    "error": (FILTER + "forbid(0x50001, 41, 42)\n", "a seccomp filter forbids it socket, connect"),
    "death": (FILTER + "forbid(0x80000000, 217)\n", "a seccomp filter forbids it getdents64"),
    "root": (ROOT_FOLDER, "its root folder has no /proc"),
}


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_sandbox_that_keeps_a_task_from_its_gpu_is_named_and_the_job_goes_on(
    kind: str, engine: str, tmp_path: Path
) -> None:
    """A system call that would end the process is not tried."""
    taken, named = REFUSED[kind]
    done, said = said_with_a_checkpoint_between(
        f"sandbox-{kind}", engine, GPU + taken + ENDS, tmp_path, ""
    )
    assert done.returncode == Unreachable.exit_code, done.stderr
    assert re.search(rf"Process \d+ of job .* after a checkpoint: {named}\.", done.stderr)
    assert said == ["ready", "gpu True"]
    assert not (tmp_path / "image").exists()


def test_a_filter_that_lets_everything_needed_through_is_no_obstacle(tmp_path: Path) -> None:
    program = GPU + FILTER + "forbid(0x80000000, 101, 165, 250, 321)\n" + ENDS
    assert said_across_a_restore("filtered", program, tmp_path) == ["ready", "gpu True"]


def test_a_job_whose_title_is_written_over_is_taken_over(runs: Any, tmp_path: Path) -> None:
    """Its task finds the next coordinator, and comes back from its checkpoint."""
    end = tmp_path / "end"
    program = GPU + TITLE + ENDS
    run = runs("titled", [sys.executable, "-c", program, str(end)], "", "--engine", "replay")
    run.wait_lines(1)
    kill_coordinator(run.name)
    run.dump(tmp_path / "image")
    end.touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert (restored.returncode, restored.stdout) == (0, "gpu True\n"), restored.stderr


@pytest.fixture
def stopped(runs: Any, tmp_path: Path) -> Iterator[tuple[Any, int]]:
    """A job whose task is stopped, as a scheduler suspends it."""
    run = runs("stopped", [sys.executable, "-c", GPU + ENDS, str(tmp_path / "end")])
    run.wait_lines(1)
    pid = Registry().find(run.name).root_pid
    os.kill(pid, signal.SIGSTOP)
    yield run, pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_task_is_named_and_stays_stopped(
    stopped: tuple[Any, int], tmp_path: Path
) -> None:
    run, pid = stopped
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
    assert done.returncode == TaskStopped.exit_code
    assert f"Process {pid} of job 'stopped' is stopped (SIGSTOP)" in done.stderr
    assert is_stopped(pid)
    os.kill(pid, signal.SIGCONT)
    run.dump(tmp_path / "image")
    (tmp_path / "end").touch()
    assert flowgpu("restore", tmp_path / "image").stdout == "gpu True\n"


def test_a_limit_of_addresses_is_named_before_anything_is_started() -> None:
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh"]
    words = [*limited, *FLOWGPU, "run", "--gpu", "emulated", "--", "true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == AddressSpaceLimited.exit_code, done.stderr
    assert "Processes may have no more than 4096000000 bytes of addresses" in done.stderr
    assert "ulimit -v unlimited" in done.stderr
