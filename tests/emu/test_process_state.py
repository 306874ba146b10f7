"""What a job has of the kernel besides its memory goes on after a restore: timers, signals, pipes,
files, whatever its standard input is. Real coordinator, real CRIU, emulated GPU.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import DUMPED_EXIT, MissingCapability, RestoreFailed, Unsupported
from flowgpu.image.reader import Image
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu, runs, runtime_dir
from tests.unit.coordinator_job import wait_for

__all__ = ["runs", "runtime_dir"]

# Uses the GPU before and after; says "ready" once all is set up and waits until a file is there.
# `went()` stands between the two: what is above it happens before the dump, below after the
# restore.
GPU = """
import ctypes, fcntl, os, select, signal, struct, subprocess, sys, time
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
memory = ok(cu.cuMemAlloc(4096))
ok(cu.cuMemsetD8(memory, 5, 4096))
def gpu():
    data = bytearray(4096)
    ok(cu.cuMemcpyDtoH(data, memory, 4096))
    return data == bytes([5]) * 4096
def went():
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())
libc = ctypes.CDLL(None, use_errno=True)
"""

TIMERS = (
    GPU
    + """
beats = {signal.SIGALRM: 0, signal.SIGRTMIN + 1: 0}
def beat(number, _):
    beats[number] += 1
for number in beats:
    signal.signal(number, beat)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
event = ctypes.create_string_buffer(64)
struct.pack_into("qii", event, 0, 0, signal.SIGRTMIN + 1, 0)  # SIGEV_SIGNAL
posix, period = ctypes.c_void_p(), struct.pack("qqqq", 0, 20_000_000, 0, 20_000_000)
assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(posix)) == 0
assert libc.timer_settime(posix, 0, period, None) == 0
periodic = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
assert libc.timerfd_settime(periodic, 0, period, None) == 0
far = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
assert libc.timerfd_settime(far, 0, struct.pack("qqqq", 0, 0, 1000, 0), None) == 0
assert until(lambda: min(beats.values()) > 2)
went()
before = dict(beats)
print("itimer", until(lambda: beats[signal.SIGALRM] > before[signal.SIGALRM] + 2))
print("posix", until(lambda: beats[signal.SIGRTMIN + 1] > before[signal.SIGRTMIN + 1] + 2))
rung = lambda: select.select([periodic], [], [], 5)[0] and struct.unpack("Q", os.read(periodic, 8))
print("timerfd", all(rung() for _ in range(3)))  # it had rung, unread, when it was dumped
left, now = signal.getitimer(signal.ITIMER_VIRTUAL)[0], (ctypes.c_int64 * 4)()
assert libc.timerfd_gettime(far, now) == 0
print("left", 900 < left < 1001, 900 < now[2] < 1001)
print("gpu", gpu(), flush=True)
os._exit(0)  # Python's own end gives signals their default actions before
"""
)

SIGNALS = (
    GPU
    + """
got = []
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
queued = signal.SIGRTMIN + 2
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, queued})
os.kill(os.getpid(), signal.SIGUSR1)
libc.pthread_self.restype = ctypes.c_void_p
this = ctypes.c_void_p(libc.pthread_self())  # a thread of the driver's may take a process's
for value in (7, 8):
    assert libc.pthread_sigqueue(this, queued, ctypes.c_void_p(value)) == 0
went()
print("pending", sorted(signal.sigpending()) == [signal.SIGUSR1, queued], got)
waited = struct.pack("Q", 1 << (queued - 1))
for _ in range(2):
    info = ctypes.create_string_buffer(128)
    assert libc.sigtimedwait(waited, info, struct.pack("qq", 0, 0)) == queued
    print("queued", struct.unpack_from("i", info, 24)[0])
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
print("handled", got == [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR2)
print("ignored", signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)
print("gpu", gpu())
"""
)

DESCRIPTORS = (
    GPU
    + """
inside, outside = os.pipe()
count, poll = os.eventfd(3, os.EFD_NONBLOCK), select.epoll()
poll.register(inside, select.EPOLLIN)
poll.register(count, select.EPOLLIN | select.EPOLLET)
assert poll.poll(5) == [(count, select.EPOLLIN)]
in_flight = os.pipe()
os.write(in_flight[1], b"in flight")
unlinked = open(sys.argv[1] + ".unlinked", "w+b", buffering=0)
unlinked.write(b"unlinked")
unlinked.seek(2)
os.unlink(unlinked.name)
memfd = os.memfd_create("kept", os.MFD_ALLOW_SEALING)
os.write(memfd, b"memfd")
fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
child.stdin.write(b"one")
assert child.stdout.read(3) == b"one"
print(os.read(0, 6).decode().strip())
went()
print(os.read(0, 100).decode().strip())
os.write(outside, b"x")
print("epoll", (inside, select.EPOLLIN) in poll.poll(5))
os.write(count, struct.pack("Q", 4))
print("eventfd", (count, select.EPOLLIN) in poll.poll(5), os.eventfd_read(count))
print("pipe", os.read(in_flight[0], 100))
print("unlinked", unlinked.read(), os.fstat(unlinked.fileno()).st_nlink)
os.lseek(memfd, 0, 0)
print("memfd", os.read(memfd, 100), fcntl.fcntl(memfd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_GROW)
child.stdin.write(b"two")
child.stdin.close()
print("child", child.stdout.read(), child.wait())
print("gpu", gpu())
"""
)

FILES = (
    GPU
    + """
folder = sys.argv[1] + ".files"
os.mkdir(folder)
with open(folder + "/read", "wb") as file:
    file.write(b"0123456789")
read = os.open(folder + "/read", os.O_RDONLY)
assert os.read(read, 4) == b"0123"
shared = os.dup(read)
both = os.open(folder + "/both", os.O_RDWR | os.O_CREAT, 0o600)
os.write(both, b"written, ")
os.lseek(both, 3, 0)
append = os.open(folder + "/append", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(append, b"one ")
os.lseek(append, 0, 0)
went()
print("read", os.read(read, 3), os.read(shared, 3))
os.write(both, b"TTEN")
print("both", os.lseek(both, 0, 1), os.pread(both, 100, 0))
print("append", os.lseek(append, 0, 1), bool(fcntl.fcntl(append, fcntl.F_GETFL) & os.O_APPEND))
os.write(append, b"two")
print("append", open(folder + "/append", "rb").read())
print("gpu", gpu())
"""
)

# One processor is not the default where there are two.
PROCESSES = (
    GPU
    + """
import threading
stopped = subprocess.Popen(["sleep", "1000"])
os.kill(stopped.pid, signal.SIGSTOP)
ended = subprocess.Popen(["echo", "unread"], stdout=subprocess.PIPE)
ended.wait()
first, *_, last = sorted(os.sched_getaffinity(0))
def bound():
    os.sched_setaffinity(0, {last})
    binding.set()
    leave.wait()
    print("thread", os.sched_getaffinity(0) == {last})
binding, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=bound)
thread.start()
binding.wait()
os.sched_setaffinity(stopped.pid, {first})
def state():
    return open(f"/proc/{stopped.pid}/stat").read().rpartition(")")[2].split()[0]
until(lambda: state() == "T")
went()
print("stopped", state(), os.sched_getaffinity(stopped.pid) == {first})
os.kill(stopped.pid, signal.SIGCONT)
print("goes on", until(lambda: state() == "S"))
stopped.kill()
print("ended", stopped.wait(), ended.stdout.read())
leave.set()
thread.join()
print("all", os.sched_getaffinity(0) >= {first, last})
print("gpu", gpu())
"""
)

# Arguments after the first: close standard input.
CLOSED = (
    GPU
    + """
def stdin():
    try:
        return os.readlink("/proc/self/fd/0")
    except OSError:
        return "closed"
if sys.argv[2:]:
    os.close(0)
print(stdin())
went()
print("gpu", gpu())  # waits until the coordinator has this process again
print(stdin())
"""
)

JOBS: dict[str, tuple[str, list[str]]] = {
    "timers": (
        TIMERS,
        ["ready", "itimer True", "posix True", "timerfd True", "left True True", "gpu True"],
    ),
    "signals": (
        SIGNALS,
        [
            "ready",
            "pending True []",
            "queued 7",
            "queued 8",
            "handled True",
            "ignored True",
            "gpu True",
        ],
    ),
    "descriptors": (
        DESCRIPTORS,
        [
            "first",
            "ready",
            "second",
            "epoll True",
            "eventfd True 7",
            "pipe b'in flight'",
            "unlinked b'linked' 0",
            "memfd b'memfd' True",
            "child b'two' 0",
            "gpu True",
        ],
    ),
    "files": (
        FILES,
        [
            "ready",
            "read b'456' b'789'",
            "both 7 b'wriTTEN, '",
            "append 0 True",
            "append b'one two'",
            "gpu True",
        ],
    ),
    "processes": (
        PROCESSES,
        [
            "ready",
            "stopped T True",
            "goes on True",
            "ended -9 b'unread\\n'",
            "thread True",
            "all True",
            "gpu True",
        ],
    ),
}


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("kind", JOBS)
def test_what_a_job_has_of_the_kernel_goes_on(kind: str, engine: str, tmp_path: Path) -> None:
    program, expected = JOBS[kind]
    (tmp_path / "input").write_text("first\nsecond\n")
    with open(tmp_path / "input") as stdin:
        said = said_across_a_restore(f"state-{kind}", program, tmp_path, engine=engine, stdin=stdin)
    assert said == expected


def test_a_command_without_standard_input_gives_its_job_an_empty_one(tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" <&-', "sh"]
    said = said_across_a_restore("state-none", CLOSED, tmp_path, before=closed)
    assert said == ["/dev/null", "ready", "gpu True", "/dev/null"]


def test_what_a_job_has_closed_is_not_taken_by_descriptors_of_ours(tmp_path: Path) -> None:
    said = said_across_a_restore("state-closed", CLOSED, tmp_path, "close it")
    assert said == ["closed", "ready", "gpu True", "closed"]


SENDER = (
    GPU
    + """
import socket
client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect(sys.argv[2])
went()
print("sent", client.send(b"line"), "gpu", gpu())
"""
)


def test_a_sender_to_a_server_outside_finds_it_again_or_its_restore_names_it(
    tmp_path: Path, runtime_dir: Path
) -> None:
    server = runtime_dir / "log"  # short, as a path of a socket has to be

    def listening() -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.bind(str(server))
        made.settimeout(SECONDS)
        return made

    with listening() as first:
        said = said_across_a_restore("state-sender", SENDER, tmp_path, str(server))
        assert said == ["ready", "sent 4 gpu True"]
        assert first.recv(9) == b"line"
    server.unlink()
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == RestoreFailed.exit_code
    assert f"it sends to the socket {server} of a process outside" in restored.stderr
    with listening() as second:
        restored = flowgpu("restore", tmp_path / "image")
        assert restored.stdout == "sent 4 gpu True\n", restored.stderr
        assert second.recv(9) == b"line"


def said_across_a_restore(
    name: str,
    program: str,
    folder: Path,
    *arguments: str,
    before: Sequence[str] = (),
    engine: str = "auto",
    **options: Any,
) -> list[str]:
    """The lines of a job that is dumped when it says that it is ready, and restored.

    `before` is put in front of the command.
    """
    go, out = folder / "go", folder / "out"
    job = [sys.executable, "-c", program, str(go), *arguments]
    chosen = ["--gpu", "emulated", "--engine", engine, "--name", name]
    words = [*before, *FLOWGPU, "run", *chosen, "--", *job]
    with (
        open(out, "wb") as output,
        subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, **options) as process,
    ):
        try:
            wait_for(
                lambda: "ready" in out.read_text() or process.poll() is not None, "ready", SECONDS
            )
            assert process.poll() is None, out.read_text()
            done = flowgpu("pause-and-dump", name, "--output", folder / "image")
            assert done.returncode == 0, done.stderr
            assert process.wait(SECONDS) == DUMPED_EXIT
            assert engine in ("auto", Image(folder / "image").manifest.engine)
        finally:
            flowgpu("kill", name)
    go.touch()
    restored = flowgpu("restore", folder / "image")
    assert restored.returncode == 0, restored.stderr
    lines = [*out.read_text().splitlines(), *restored.stdout.splitlines()]
    return [line for line in lines if not line.startswith("flowgpu: ")]


def said_with_a_checkpoint_between(
    name: str,
    engine: str,
    program: str,
    folder: Path,
    argument: object,
    *options: str,
    before: Sequence[str] = (),
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The checkpoint of a job that is ready, and all lines of that job, which goes on and ends."""
    go, out = folder / "go", folder / "out"
    words = ["run", "--gpu", "emulated", "--engine", engine, "--name", name, "--"]
    job = [sys.executable, "-c", program, str(go), str(argument)]
    with (
        open(out, "wb") as output,
        subprocess.Popen([*before, *FLOWGPU, *words, *job], cwd=ROOT, stdout=output) as process,
    ):
        try:
            wait_for(lambda: "ready" in out.read_text(), "ready", SECONDS)
            done = flowgpu("pause-and-dump", name, "--output", folder / "image", *options)
            go.touch()
            assert process.wait(SECONDS) == 0, done.stderr
        finally:
            flowgpu("kill", name)
    return done, out.read_text().splitlines()


# The driver lets a registration stand when the program unmaps, closes or cuts its memory.
LET_GO = (
    GPU
    + """
SIZE, free = 4 * 4096, 0x3f0000000000
def registered(fd=-1):
    global free  # nobody else's memory comes where the program has let go of some
    at, free = ctypes.c_void_p(free), free + (1 << 20)
    flags = 0x100000 | (2 | 32 if fd < 0 else 1)  # at this place, private and anonymous or shared
    assert libc.mmap(at, ctypes.c_size_t(SIZE), 3, flags, fd, ctypes.c_long(0)) != -1
    ctypes.memset(at, 7, SIZE)
    ok(cu.cuMemHostRegister(at.value, SIZE, 0))
    return at.value
unmapped, part, closed, whole, told = (registered() for _ in range(5))
file = os.fdopen(os.memfd_create("shared"), "wb+")  # Linux pins no shared pages of a file on disk
file.truncate(SIZE)
cut = registered(file.fileno())
file.truncate(4096)
assert libc.munmap(ctypes.c_void_p(unmapped), SIZE) == 0
assert libc.munmap(ctypes.c_void_p(told), SIZE) == 0
assert libc.munmap(ctypes.c_void_p(part + 4096), 4096) == 0
assert libc.mprotect(ctypes.c_void_p(closed), SIZE, 0) == 0
def modes():
    lines = [line.split()[:2] for line in open("/proc/self/maps")]
    ends = [(*(int(word, 16) for word in place.split("-")), mode) for place, mode in lines]
    found = lambda at: [mode for start, end, mode in ends if start <= at < end]
    return [found(at) for at in (unmapped, part + 4096, closed, cut + 8192)]
def through(at):
    ok(cu.cuMemcpyHtoD(memory, at, 4096))
    data = bytearray(4096)
    ok(cu.cuMemcpyDtoH(data, memory, 4096))
    ok(cu.cuMemsetD8(memory, 5, 4096))
    return data == bytes([7]) * 4096
def given_up(*ranges):
    return [cu.cuMemHostUnregister(one)[0].name for one in ranges]
print("before", modes(), through(part), *given_up(told, told))
went()
print("after", modes(), through(part), through(cut))
print(*set(given_up(unmapped, part, closed, whole, cut)), *given_up(unmapped), gpu())
"""
)
MODES = "[[], [], ['---p'], ['rw-s']]"
BEFORE_LET_GO = [
    f"before {MODES} True CUDA_SUCCESS CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    "ready",
]
AFTER_LET_GO = [
    f"after {MODES} True True",
    "CUDA_SUCCESS CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED True",
]


def test_a_registration_of_memory_that_is_gone_stands_after_a_restore(
    tmp_path: Path,
) -> None:
    said = said_across_a_restore("let-go", LET_GO, tmp_path, engine="auto")
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]
    assert Image(tmp_path / "image").manifest.engine == "replay"
    again = flowgpu("restore", tmp_path / "image")
    assert again.stdout.splitlines() == AFTER_LET_GO, again.stderr


def test_a_registration_of_memory_that_is_gone_stands_in_a_job_left_running_and_its_copy(
    tmp_path: Path,
) -> None:
    done, said = said_with_a_checkpoint_between(
        "let-go-live", "auto", LET_GO, tmp_path, tmp_path / "shared", "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.stdout.splitlines() == AFTER_LET_GO, restored.stderr


def test_a_registration_of_memory_that_is_gone_stands_after_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", "criu_dump:1")
    done, said = said_with_a_checkpoint_between(
        "let-go-failed", "auto", LET_GO, tmp_path, tmp_path / "shared"
    )
    assert done.returncode == 73, done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]


def test_the_native_engine_names_registered_memory_that_is_gone(tmp_path: Path) -> None:
    """The emulated driver does not register it again; whether a real one does is not known."""
    done, said = said_with_a_checkpoint_between(
        "let-go-native", "native", LET_GO, tmp_path, tmp_path / "shared"
    )
    assert done.returncode == Unsupported.exit_code
    assert "registered memory of the host that was unmapped, closed or cut" in done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]


# NVML (tests/emu/programs/nvml.c), initialised twice and used all the time, by threads too.
NVML = (
    GPU
    + """
import threading
nvml, device, degrees = ctypes.CDLL(sys.argv[2]), ctypes.c_void_p(), ctypes.c_uint()
poller, nine = ctypes.CDLL(sys.argv[2].replace("nvml.so", "poller.so")), ctypes.c_int(9)
poller.poller_calls.restype = poller.poller_ends.restype = ctypes.c_long
assert [nvml.nvmlInit_v2(), nvml.nvmlInit_v2()] == [0, 0]
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
def temperature():
    return nvml.nvmlDeviceGetTemperature(device, 0, ctypes.byref(degrees)), degrees.value
def polled():
    before = [poller.poller_calls(which) for which in (0, 1)]
    return until(lambda: all(poller.poller_calls(which) > before[which] for which in (0, 1)))
threading.Thread(target=nvml.nvmlEventSetWait_v2, args=(None, None, 600_000), daemon=True).start()
assert poller.poller_begins(device) == 0
print("before", temperature(), nvml.nvmlSumForTest(*range(1, 9), ctypes.byref(nine)), polled())
went()
print("after", temperature(), polled(), poller.poller_ends())
print("ends", [nvml.nvmlShutdown() for _ in range(3)], temperature()[0])
print("gpu", gpu(), flush=True)
os._exit(0)  # a thread waits for events
"""
)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nvml") / "nvml.so"
    options = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    compile_program("nvml.c", library, *options)
    found = [str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--no-as-needed"]
    library.with_name("libnvidia-ml.so.1").symlink_to(library)
    compile_program("nvml_poller.c", library.with_name("poller.so"), *options[:2], *found)
    return library


BEFORE_NVML = ["before (0, 40) 45 True", "ready"]
AFTER_NVML = ["after (0, 40) True 0", "ends [0, 0, 1] 1", "gpu True"]


def test_nvml_is_there_as_before_when_replay_has_ended_cuda(nvml: Path, tmp_path: Path) -> None:
    """No thread that polls finds it shut down. The native engine leaves it to the driver, which the
    emulated one does not do."""
    said = said_across_a_restore("nvml", NVML, tmp_path, str(nvml), engine="replay")
    assert said == [*BEFORE_NVML, *AFTER_NVML]


def test_nvml_is_there_in_a_job_left_running_and_in_its_copy(nvml: Path, tmp_path: Path) -> None:
    done, said = said_with_a_checkpoint_between(
        "nvml-live", "replay", NVML, tmp_path, nvml, "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert said == [*BEFORE_NVML, *AFTER_NVML]
    assert restored.stdout.splitlines() == AFTER_NVML


@pytest.mark.parametrize("options", [(), ("--leave-running",)])
@pytest.mark.parametrize("fault", ["criu_dump", "commit"])
def test_nvml_is_there_after_a_checkpoint_that_failed(
    fault: str,
    options: tuple[str, ...],
    nvml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", f"{fault}:1")
    done, said = said_with_a_checkpoint_between(
        "nvml-failed", "replay", NVML, tmp_path, nvml, *options
    )
    assert done.returncode == 73, done.stderr
    assert said == [*BEFORE_NVML, *AFTER_NVML]


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_another_client_of_the_driver_is_named_and_the_job_goes_on(
    engine: str, tmp_path: Path
) -> None:
    """libnvcuvid, which nvJPEG loads for the hardware's decoder."""
    empty, library = tmp_path / "empty.c", tmp_path / "libnvcuvid.so.1"
    empty.touch()
    subprocess.run(["cc", "-shared", "-o", library, empty], check=True)
    program = GPU + "ctypes.CDLL(sys.argv[2])\nwent()\nprint('gpu', gpu())\n"
    done, said = said_with_a_checkpoint_between("cuvid", engine, program, tmp_path, library)
    assert done.returncode == Unsupported.exit_code
    assert re.search(r"uses libnvcuvid beside CUDA \(process \d+\), which", done.stderr)
    assert said == ["ready", "gpu True"]


# Connected to a server outside and to itself, it asks both again after the restore, and connects
# anew where it cannot.
CONNECTED = (
    GPU
    + """
import errno, socket
def connect(): return socket.create_connection(("127.0.0.1", int(sys.argv[2])))
def ask(s):
    try:
        s.sendall(b"asked ")
        return s.recv(100).decode()
    except OSError as error:
        return errno.errorcode[error.errno]
outside, server = connect(), socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
accepted = server.accept()[0]
accepted.sendall(b"kept")
print(ask(outside))
went()
print("outside", ask(outside), "inside", ask(inside))
print("again", ask(connect()))
inside = socket.create_connection(server.getsockname())
print("listens", server.accept()[0].send(b"x"), inside.recv(1))
print("gpu", gpu())
"""
)


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(100):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server of this process."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_connections_outside_are_closed_in_an_image_where_that_is_asked_for(
    engine: str, echo: int, tmp_path: Path
) -> None:
    """Not in the job itself, which goes on with them."""
    done, said = said_with_a_checkpoint_between(
        "connected", engine, CONNECTED, tmp_path, echo, "--leave-running", "--tcp", "close"
    )
    assert done.returncode == 0, done.stderr
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    ends = ["again asked ", "listens 1 b'x'", "gpu True"]
    before = ["asked ", "ready"]
    assert said == [*before, "outside asked  inside kept", *ends]
    assert restored.stdout.splitlines() == ["outside EPIPE inside kept", *ends]


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv here")
def test_the_right_that_connections_need_is_named(echo: int, tmp_path: Path) -> None:
    rights = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done, said = said_with_a_checkpoint_between(
        "no-right", "auto", CONNECTED, tmp_path, echo, "--leave-running", before=rights
    )
    assert done.returncode == MissingCapability.exit_code
    assert "CAP_NET_ADMIN" in done.stderr
    assert said[-1] == "gpu True"


# Counts until a file is there, and says whether its output is a terminal.
COUNTING = (
    GPU
    + """
print("terminal", os.isatty(1))
count = 0
while not os.path.exists(sys.argv[1]):
    print("line", count)
    count += 1
    time.sleep(0.05)
print("gpu", gpu())
"""
)


class Terminal:
    """A terminal on which a command runs, and what it has shown there."""

    def __init__(self, *words: object) -> None:
        self._master, slave = os.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [*FLOWGPU, *map(str, words)],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={key: os.environ[key] for key in os.environ if key != "PYTHONUNBUFFERED"},
            start_new_session=True,
        )
        os.close(slave)

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self._read(), text, SECONDS)

    def end(self) -> int:
        """The command's exit code. Nobody has the terminal open afterwards."""
        code = self.process.wait(SECONDS)
        self.close()
        return code

    def close(self) -> None:
        if self._master >= 0:
            self.process.kill()
            self.process.wait()
            self._read()
            os.close(self._master)
            self._master = -1

    def numbers(self) -> list[int]:
        """Of the lines that it has shown, in their order."""
        return [int(number) for number in re.findall(r"^line (\d+)$", self.shown, re.MULTILINE)]

    def _read(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self.shown += os.read(self._master, 1 << 16).decode().replace("\r\n", "\n")
            except OSError:  # the command has ended
                break
        return self.shown


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def on_terminal(*words: object) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield on_terminal
    for shown in opened:
        shown.close()


def test_a_job_of_one_terminal_goes_on_in_another(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    image, end = tmp_path / "image", tmp_path / "end"
    words = ["--gpu", "emulated", "--name", "on-tty", "--", sys.executable, "-c", COUNTING, end]
    first = terminal("run", *words)
    try:
        first.wait_for("line 3\n")  # as it says it, no full buffer later
        done = flowgpu("pause-and-dump", "on-tty", "--output", image)
        assert done.returncode == 0, done.stderr
        assert first.end() == DUMPED_EXIT
        second = terminal("restore", image)
        second.wait_for("line ")
        end.touch()
        second.wait_for("gpu True\n")
        assert second.end() == 0
    finally:
        flowgpu("kill", "on-tty")
    assert first.shown.startswith("terminal False\n")  # docs/limits.md
    numbers = first.numbers() + second.numbers()
    assert numbers == list(range(len(numbers)))
    logged = [line for line in flowgpu("logs", "on-tty").stdout.splitlines() if "line" in line]
    assert logged == [f"line {number}" for number in numbers]


# A child on a terminal of the job's own, as script(1) and tmux have them.
OWN_TERMINAL = (
    GPU
    + """
import pty, termios
child, master = pty.fork()
if child == 0:
    os.execvp("sh", ["sh", "-c", "read word; tty -s && echo got $word; stty size"])
fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 17, 71, 0, 0))
went()
os.write(master, b"word\\n")
said = b""
while b"71" not in said:
    said += os.read(master, 100)
print(said.split())
print("child", os.waitpid(child, 0)[1])
print("gpu", gpu())
"""
)


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_terminal_of_the_jobs_own_goes_on(engine: str, tmp_path: Path) -> None:
    said = said_across_a_restore("own-tty", OWN_TERMINAL, tmp_path, engine=engine)
    words = [b"word", b"got", b"word", b"17", b"71"]
    assert said == ["ready", str(words), "child 0", "gpu True"]
