"""Children, signals and ends of a process that the intercept library lives in."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import wire
from flowgpu.wire import Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import Connection, Coordinator, Ghost, Program

Job = tuple[Coordinator, Program, Connection]

# What a child of fork() holds: descriptors of the parent's that are sockets or device memory,
# mappings of the device, the addresses for its memory, threads.
INSPECT = """
import json, os, socket
def inspect():
    held = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + fd)
        except OSError:
            continue
        if target.startswith("socket:") or "flowgpu" in target:
            held.append(target)
    lines = open("/proc/self/maps").readlines()
    maps = [line.split()[-1] for line in lines if "flowgpu-emu-device" in line]
    window = any(0x200000000000 <= int(line.split("-")[0], 16) < 0x300000000000 for line in lines)
    return {"fds": held, "maps": maps, "window": window,
            "threads": len(os.listdir("/proc/self/task")),
            "init": int(cu.cuInit(0)[0]), "alloc": int(cu.cuMemAlloc(4)[0])}
"""
NOT_INITIALIZED = 3


@pytest.fixture
def task_job(tmp_path: Path) -> Iterator[Job]:
    with lib.job(tmp_path) as made:
        yield made


def check_child(report: dict[str, object]) -> None:
    assert report == {
        "fds": [], "maps": [], "window": False, "threads": 1,
        "init": NOT_INITIALIZED, "alloc": NOT_INITIALIZED,
    }  # fmt: skip


def fork(program: Program, report: Path, then: str = "") -> None:
    """Fork a child that writes what it holds and ends when its parent does."""
    program.do(
        "import signal, warnings; warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    found = inspect()\n{then}\n"
        f"    open({str(report)!r} + '.new', 'w').write(json.dumps(found))\n"
        f"    os.rename({str(report)!r} + '.new', {str(report)!r})\n"
        "    signal.pause()\n"
    )
    lib.wait_until(report.exists, "the child's report")


def end_child(program: Program) -> None:
    program.do("os.kill(child, signal.SIGKILL); os.waitpid(child, 0)[1]")


def test_a_forked_child_holds_nothing_of_the_device(task_job: Job, tmp_path: Path) -> None:
    _, program, task = task_job
    program.do(INSPECT)
    program.do("x = int(ok(cu.cuMemAlloc(100))); ok(cu.cuMemsetD8(x, 1, 100))")
    parent = program.do("inspect()")
    assert parent["fds"] and parent["maps"] and parent["window"], (
        "there is nothing that the child could have dropped"
    )
    fork(program, tmp_path / "report")
    check_child(json.loads((tmp_path / "report").read_text()))
    # The parent does not notice, and can be checkpointed beside its child.
    after = program.do("inspect()")
    assert sorted(after["fds"]) == sorted(parent["fds"]) and after["maps"] == parent["maps"]
    task.close_gate()
    task.ok(Message.OPEN)
    assert program.do("bool((download(x, 100, np.uint8) == 1).all())")
    end_child(program)


# The emulated driver's own sockets come and go with threads.
OURS = """
import os, socket
def is_ours(fd):
    link = os.readlink(f"/proc/self/fd/{fd}")
    if not link.startswith("socket:"):
        return "flowgpu-control" in link or "flowgpu-live" in link
    with socket.socket(fileno=os.dup(fd)) as copy:
        try:
            return copy.getpeername() == os.environ["FLOWGPU_SOCKET"]
        except OSError:  # it is connected to nothing any more
            return False
def ours():
    return [fd for fd in range(2048) if os.path.islink(f"/proc/self/fd/{fd}") and is_ours(fd)]
"""


def test_low_descriptors_are_left_to_the_program(task_job: Job) -> None:
    """Also when it has closed some, and the connection is made again."""
    coordinator, program, task = task_job
    program.do(OURS)
    before = program.do("ours()")
    assert len(before) == 3 and min(before) >= 512  # control page, connection, live blocks
    program.do("os.close(2)")
    task.close()
    coordinator.accept()
    lib.wait_until(lambda: len(program.do("ours()")) == 3, "a new connection")
    assert min(program.do("ours()")) >= 512


def test_a_child_forked_during_a_checkpoint_does_not_keep_the_channel(
    task_job: Job, tmp_path: Path
) -> None:
    _, program, task = task_job
    program.do(INSPECT)
    program.do("x = int(ok(cu.cuMemAlloc(3 * MIB))); ok(cu.cuMemsetD8(x, 1, 100))")
    ghost = Ghost()
    lib.export(task, ghost)
    fork(program, tmp_path / "report")
    check_child(json.loads((tmp_path / "report").read_text()))
    task.ok(Message.DROP)
    ghost.thread.join(lib.SECONDS)
    assert not ghost.thread.is_alive(), "the child keeps the channel open"
    ghost.close()
    end_child(program)


def test_a_fork_behind_the_closed_gate_waits_for_it_to_open(task_job: Job, tmp_path: Path) -> None:
    _, program, task = task_job
    program.do(INSPECT)
    program.do("x = int(ok(cu.cuMemAlloc(3 * MIB))); ok(cu.cuMemsetD8(x, 1, 100))")
    report, go = tmp_path / "report", tmp_path / "go"
    program.do(
        f"""
import threading, time
def fork():
    while not os.path.exists({str(go)!r}):
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        open({str(report)!r}, "w").write(json.dumps(inspect()))
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
ended = []
"""
    )
    ghost = Ghost()
    lib.export(task, ghost)
    task.close_gate()
    program.do("threading.Thread(target=fork).start()")
    # Once it has answered: a thread that forks keeps Python's lock.
    go.touch()
    time.sleep(0.5)
    task.ok(Message.HANDOVER)
    assert not report.exists()
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    ghost.close()
    lib.wait_until(lambda: program.do("ended") == [0], "the child's end")
    check_child(json.loads(report.read_text()))
    assert program.do("bool((download(x, 100, np.uint8) == 1).all())")


def test_a_child_of_a_task_that_was_given_its_memory_back_holds_none(
    task_job: Job, tmp_path: Path
) -> None:
    """Blocks that came back are kept as descriptors: the child drops them too."""
    _, program, task = task_job
    program.do(INSPECT)
    program.do("x = int(ok(cu.cuMemAlloc(3 * MIB))); ok(cu.cuMemsetD8(x, 1, 100))")
    ghost = Ghost()
    lib.hand_over(task, ghost)
    assert lib.map_back(task, ghost).status == 0
    task.ok(Message.OPEN)
    ghost.close()
    fork(program, tmp_path / "report")
    check_child(json.loads((tmp_path / "report").read_text()))
    assert program.do("bool((download(x, 100, np.uint8) == 1).all())")
    end_child(program)


def test_a_grandchild_loses_no_file_of_the_childs(task_job: Job, tmp_path: Path) -> None:
    """Numbers of what the child closed are free for its own files; its child must keep those."""
    _, program, _ = task_job
    program.do(INSPECT)
    then = (
        "    files = [os.open('/dev/null', os.O_RDONLY) for _ in range(600)]\n"
        "    second = os.fork()\n"
        "    if second == 0:\n"
        "        kept = 0\n"
        "        for fd in files:\n"
        "            try: os.fstat(fd); kept += 1\n"
        "            except OSError: pass\n"
        "        os._exit(0 if kept == len(files) else 1)\n"
        "    found['grandchild'] = os.waitpid(second, 0)[1]\n"
    )
    fork(program, tmp_path / "report", then)
    report = json.loads((tmp_path / "report").read_text())
    assert report.pop("grandchild") == 0
    check_child(report)
    end_child(program)


def test_a_child_that_executes_a_program_registers_itself(task_job: Job) -> None:
    coordinator, program, task = task_job
    program.do(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tests.emu.intercept_task'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "child.stdin.write('\"start(); ok(cu.cuMemAlloc(100))\"\\n'); child.stdin.flush()"
    )
    second = coordinator.accept()
    assert second.hello.pid == program.do("child.pid") != task.hello.pid
    lib.wait_until(lambda: second.page.allocation_bytes == 100, "the child's allocation")
    for connection in (task, second):
        connection.close_gate()
        connection.ok(Message.OPEN)
    assert program.do("child.communicate(); child.returncode") == 0
    assert second.peer.recv(1) == b""
    assert task.page.allocations == 0


def ends_behind_the_gate(program: Program, task: Connection) -> None:
    """Assert that the end of a program waits for an open gate."""
    task.close_gate()
    assert program.process.stdin
    program.process.stdin.close()
    time.sleep(0.3)
    assert program.process.poll() is None, "the end went through the gate"
    task.send(Message.OPEN)
    assert program.process.wait(lib.SECONDS) == 0
    if answer := task.peer.recv(1 << 16):  # it may have ended before it said so
        assert wire.Reply.unpack(answer).status == Status.OK
        assert task.peer.recv(1) == b""


def test_a_program_that_ends_while_the_gate_is_closed_ends_after_it(task_job: Job) -> None:
    """The driver's exit handlers are inside the driver as any call."""
    _, program, task = task_job
    program.do("x = int(ok(cu.cuMemAlloc(100)))")
    ends_behind_the_gate(program, task)


# Asked for before cuInit, so it comes after the driver's handlers.
LAST_AT_EXIT = """
import os, time
def last(code, argument):
    while not os.path.exists(go_on):
        time.sleep(0.01)
libc = ctypes.CDLL(None)
last_at_exit = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(last)
libc.on_exit(last_at_exit, None)
"""


def test_a_program_in_exit_is_busy(tmp_path: Path) -> None:
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    with Coordinator(tmp_path / "task.sock") as coordinator, Program(environment) as program:
        program.do(f"go_on = {str(tmp_path / 'go_on')!r}\n{LAST_AT_EXIT}")
        program.do("start()")
        with contextlib.closing(coordinator.accept()) as task:
            program.send("libc.exit(7)")
            while task.gate().status == Status.OK:
                task.ok(Message.OPEN)
            assert task.gate().detail == "the program is in exit()"
            (tmp_path / "go_on").touch()
            assert program.process.wait(lib.SECONDS) == 7


def test_a_program_whose_last_call_waits_at_the_gate_ends_after_it(task_job: Job) -> None:
    _, program, task = task_job
    program.do("import atexit; atexit.register(lambda: ok(cu.cuMemFree(x))); None")
    program.do("x = int(ok(cu.cuMemAlloc(100)))")
    ends_behind_the_gate(program, task)


def test_a_task_without_a_coordinator_runs_and_ends(tmp_path: Path) -> None:
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    for socket in (environment["FLOWGPU_SOCKET"], "", None, "/" + "too-long" * 20):
        environment.pop("FLOWGPU_SOCKET", None)
        if socket is not None:
            environment["FLOWGPU_SOCKET"] = socket
        with Program(environment) as program:
            program.do("start()")
            assert program.do("int(ok(cu.cuMemAlloc(100)))") >= lib.WINDOW
            threads = len(os.listdir(f"/proc/{program.process.pid}/task"))
            assert program.end() == 0
        assert threads >= 1


def test_a_killed_task_is_noticed(task_job: Job) -> None:
    _, program, task = task_job
    program.process.kill()
    assert task.peer.recv(1) == b""
