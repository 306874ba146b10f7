"""cuCheckpointProcess* of the emulated driver: its states, what survives, and CRIU in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from flowgpu.errors import FlowError
from flowgpu.host import ptrace
from flowgpu.host.criu import Criu
from flowgpu.host.proctree import status_numbers
from tests.emu.driver_lib import CALLER
from tests.emu.test_driver import ROOT, device_environment
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

INTERRUPT = 0x4207  # linux/ptrace.h
STATES = ["RUNNING", "LOCKED", "CHECKPOINTED", "FAILED"]
# Real-time signals that only the driver's threads take, while one of them waits for an order.
SIGNALLED = """
import os, signal, socket, time
from cuda.bindings import driver as cu
cu.cuInit(0)
number = signal.SIGRTMIN + 1
signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
with socket.socket(socket.AF_UNIX) as order:
    space = os.stat("/proc/self/ns/pid").st_ino
    order.connect(f"\\0flowgpu-emu-{space}-{os.getpid()}")
    order.settimeout(0.5)
    for _ in range(100):
        os.kill(os.getpid(), number)
        time.sleep(0.001)
    try:
        print("closed", order.recv(1))
    except TimeoutError:
        print("waits")
"""
# Keeps a device alive, with the settings of its environment, until its input ends.
HOLDER = """
import sys
from cuda.bindings import driver as cu
print("up" if cu.cuInit(0)[0] == 0 else "down", flush=True)
sys.stdin.read()
"""

# Takes all memory of the device but so many MiB, until its input ends.
FILLER = """
import sys
from cuda.bindings import driver as cu
from tests.emu.driver_lib import MIB, ok, properties, start
start()
left = [ok(cu.cuMemCreate(2 * MIB, properties(), 0)) for _ in range(int(sys.argv[1]) // 2)]
size = 4096 * MIB
while size >= 2 * MIB:
    result, _ = cu.cuMemCreate(size, properties(), 0)
    if result == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        size //= 2
    else:
        assert int(result) == 0, result
for handle in left:
    ok(cu.cuMemRelease(handle))
print("full", flush=True)
sys.stdin.read()
"""


class Task:
    """A process that holds the device, and orders to it from another process."""

    def __init__(
        self, folder: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.environment = environment or device_environment(folder)
        with (folder / "task.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.emu.checkpoint_task", str(folder), *arguments],
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.rounds = 0
        self.wait_for("ready")

    def wait_for(self, name: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, (self.folder / "task.log").read_text()
            time.sleep(0.005)

    def begin_round(self) -> None:
        self.rounds += 1
        (self.folder / f"go.{self.rounds}").touch()

    def run_round(self) -> None:
        self.begin_round()
        self.wait_for(f"done.{self.rounds}")

    def order(self, verb: str, *arguments: str) -> str:
        """The result of cuCheckpointProcess<verb>, without CUDA_ERROR_."""
        command = [sys.executable, "-c", CALLER, verb, str(self.pid), *arguments]
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().removeprefix("CUDA_").removeprefix("ERROR_")

    def state(self) -> str:
        return STATES[int(self.order("GetState"))]

    def park(self) -> None:
        assert self.order("Lock", "60000") == "SUCCESS"
        assert self.order("Checkpoint") == "SUCCESS"

    def wake(self) -> None:
        assert self.order("Restore") == "SUCCESS"
        assert self.order("Unlock") == "SUCCESS"

    def holds_the_device(self) -> bool:
        return "flowgpu-emu-device" in Path(f"/proc/{self.pid}/maps").read_text()

    @contextlib.contextmanager
    def full_device(self, left: int) -> Iterator[None]:
        """Another process holds all memory of the device but `left` MiB."""
        with subprocess.Popen(
            [sys.executable, "-c", FILLER, str(left)],
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as filler:
            assert filler.stdin is not None and filler.stdout is not None
            assert filler.stdout.readline() == b"full\n"
            yield
            filler.stdin.close()

    def end_device(self) -> None:
        """Ends this test's device daemon, as a restart or another host would."""
        deadline = time.monotonic() + SECONDS
        socket = self.folder / "flowgpu-emu.sock"
        while socket.exists():
            assert time.monotonic() < deadline, "the idle device did not end"
            time.sleep(0.1)


@pytest.fixture
def start_task(tmp_path: Path) -> Iterator[Callable[..., Task]]:
    tasks: list[Task] = []

    def start(*arguments: str) -> Task:
        tasks.append(Task(tmp_path, *arguments))
        return tasks[-1]

    yield start
    for task in tasks:
        task.process.kill()
        task.process.wait()
        try:
            os.kill(task.pid, signal.SIGKILL)  # the restored one has the same id
        except ProcessLookupError:
            continue


def test_states_follow_each_other_strictly(start_task: Callable[..., Task]) -> None:
    task = start_task()
    assert task.state() == "RUNNING"
    for verb in ("Checkpoint", "Restore", "Unlock"):
        assert task.order(verb) == "ILLEGAL_STATE"
    assert task.order("Lock", "0") == "SUCCESS"
    assert task.state() == "LOCKED"
    assert task.order("Lock", "0") == "ILLEGAL_STATE"
    assert task.order("Restore") == "ILLEGAL_STATE"
    assert task.order("Checkpoint") == "SUCCESS"
    assert task.state() == "CHECKPOINTED"
    for verb in ("Checkpoint", "Unlock"):
        assert task.order(verb) == "ILLEGAL_STATE"
    assert task.order("Restore") == "SUCCESS"
    assert task.state() == "LOCKED"
    assert task.order("Unlock") == "SUCCESS"
    assert task.state() == "RUNNING"
    thread = task.order("GetRestoreThreadId")
    assert Path(f"/proc/{task.pid}/task/{thread}").exists()
    # A debugger that holds the process must be able to ask.
    os.kill(task.pid, signal.SIGSTOP)
    assert task.order("GetRestoreThreadId") == thread
    os.kill(task.pid, signal.SIGCONT)


def test_a_signal_does_not_end_the_wait_for_an_order(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env=device_environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "waits\n")


def test_orders_to_processes_without_a_driver_are_refused(start_task: Callable[..., Task]) -> None:
    task = start_task()
    task.pid = os.getpid()
    assert task.order("Lock", "100") == "NOT_INITIALIZED"
    task.pid = (1 << 22) + 1
    assert task.order("Lock", "100") == "INVALID_VALUE"
    task.pid = task.process.pid


def test_a_locked_process_stops_at_its_next_call(start_task: Callable[..., Task]) -> None:
    task = start_task()
    task.run_round()
    assert task.order("Lock", "0") == "SUCCESS"
    task.begin_round()
    time.sleep(0.3)
    assert not (task.folder / "done.2").exists()
    assert task.order("Unlock") == "SUCCESS"
    task.wait_for("done.2")


@pytest.mark.parametrize("words", [["busy"], ["busy", "destroyed"]])
def test_a_lock_waits_for_work_and_gives_up(
    words: list[str], start_task: Callable[..., Task]
) -> None:
    task = start_task(*words)
    assert task.order("Lock", "200") == "NOT_READY"
    assert task.state() == "RUNNING"
    (task.folder / "release").touch()
    assert task.order("Lock", "30000") == "SUCCESS"
    assert task.order("Unlock") == "SUCCESS"
    task.run_round()


def test_everything_survives_a_checkpoint_in_place(start_task: Callable[..., Task]) -> None:
    task = start_task()
    task.run_round()
    for _ in range(3):
        assert task.holds_the_device()
        task.park()
        assert not task.holds_the_device()
        task.wake()
        task.run_round()


def test_the_thread_of_host_functions_ends_with_its_connection(
    start_task: Callable[..., Task],
) -> None:
    """Or it would read what another is answered after a restore, by a descriptor of that number."""
    task = start_task("calls")
    threads = Path(f"/proc/{task.pid}/task")
    names = {thread: (thread / "comm").read_text() for thread in threads.iterdir()}
    (late,) = (thread for thread, name in names.items() if name == "cuda-callbacks\n")
    assert task.order("Lock", "60000") == "SUCCESS"
    with ThreadPoolExecutor(1) as pool:
        ptrace.ptrace(ptrace.SEIZE, int(late.name))
        ptrace.ptrace(INTERRUPT, int(late.name))
        os.waitpid(int(late.name), ptrace.WALL)
        parked = pool.submit(task.order, "Checkpoint")
        try:
            with pytest.raises(TimeoutError):
                parked.result(1.0)
        finally:
            ptrace.let_go(int(late.parent.parent.name), [int(late.name)])
        assert parked.result(SECONDS) == "SUCCESS"
    # Who joins a thread goes on a moment before the kernel has taken it off.
    wait_for(lambda: not late.exists(), "the end of the thread")
    task.wake()
    task.run_round()


def test_everything_survives_the_device_being_replaced(
    start_task: Callable[..., Task], tmp_path: Path
) -> None:
    task = start_task()
    task.run_round()
    task.park()
    task.end_device()
    task.wake()
    task.run_round()
    assert task.holds_the_device()
    assert (tmp_path / "device.log").read_text().count("the device ends\n") == 1


def test_shared_memory_comes_back_private_without_an_error(
    start_task: Callable[..., Task],
) -> None:
    task = start_task("shared")
    task.park()
    task.wake()
    task.run_round()
    links = Path(f"/proc/{task.pid}/fd").iterdir()
    (shared,) = (fd for fd in links if "flowgpu-emu-mem:" in os.readlink(fd))
    with shared.open("rb") as memory:
        assert memory.read(4) == (100).to_bytes(4, "little")  # the round has added 1 to its own


def test_a_restore_without_room_fails_for_good(start_task: Callable[..., Task]) -> None:
    task = start_task()
    task.park()
    task.end_device()
    environment = task.environment | {"FLOWGPU_EMU_MEMORY": "2M"}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        assert task.order("Restore") == "OUT_OF_MEMORY"
        assert task.state() == "FAILED"
        assert task.order("Unlock") == "ILLEGAL_STATE"


def check_the_drivers_room(task: Task) -> None:
    """A checkpoint needs some device memory; one that found none was the process's last."""
    task.run_round()
    with task.full_device(4):
        task.park()
    task.wake()
    task.run_round()
    with task.full_device(0):
        assert task.order("Lock", "60000") == "SUCCESS"
        assert task.order("Checkpoint") == "OUT_OF_MEMORY"
        assert task.state() == "LOCKED"
    assert task.order("Checkpoint") == "UNKNOWN"
    assert task.order("Unlock") == "SUCCESS"
    task.run_round()
    assert task.order("Lock", "60000") == "SUCCESS"
    assert task.order("Checkpoint") == "UNKNOWN"
    assert task.order("Unlock") == "SUCCESS"
    task.run_round()


def test_a_checkpoint_without_room_is_the_last(start_task: Callable[..., Task]) -> None:
    check_the_drivers_room(start_task())


def test_criu_refuses_a_process_that_holds_the_device(
    start_task: Callable[..., Task], criu: Criu, tmp_path: Path
) -> None:
    task = start_task()
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(FlowError):
        criu.dump(task.pid, images)
    task.process.send_signal(signal.SIGCONT)
    task.run_round()


@pytest.mark.parametrize("replace_device", [False, True])
def test_a_checkpointed_process_goes_through_criu(
    start_task: Callable[..., Task], criu: Criu, tmp_path: Path, replace_device: bool
) -> None:
    task = start_task()
    task.run_round()
    task.park()
    images = tmp_path / "images"
    images.mkdir()
    criu.dump(task.pid, images)
    task.process.kill()
    task.process.wait()
    if replace_device:
        task.end_device()
    restored = criu.restore(images)
    try:
        assert restored == task.pid
        os.kill(restored, signal.SIGCONT)
        assert task.state() == "CHECKPOINTED"
        task.wake()
        task.run_round()
    finally:
        os.kill(restored, signal.SIGKILL)
        os.waitpid(restored, 0)


def test_processes_of_one_number_in_two_pid_namespaces_share_network_and_device(
    tmp_path: Path,
) -> None:
    holder = [sys.executable, "-c", HOLDER]
    apart = ["unshare", "--pid", "--fork", "--mount-proc", *holder]
    environment = device_environment(tmp_path)
    with contextlib.ExitStack() as stack:
        # The device is in neither namespace.
        for command in (holder, apart, apart):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
            stack.callback(process.communicate)
            assert process.stdout
            assert process.stdout.readline() == b"up\n"
            if command is apart:
                (inside,) = psutil.Process(process.pid).children()
                assert status_numbers(inside.pid, "NSpid")[-1] == 1
                # Whoever asks from outside knows it by another number.
                asked = [sys.executable, "-c", CALLER, "GetState", str(inside.pid)]
                state = subprocess.check_output(asked, env=environment, timeout=SECONDS)
                assert STATES[int(state)] == "RUNNING"
