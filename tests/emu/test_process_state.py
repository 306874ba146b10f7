"""What a job has of the kernel besides its memory goes on after a restore: timers, signals, pipes,
files, whatever its standard input is. Real coordinator, real CRIU, emulated GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emu.gpu_job import GPU, said_across_a_restore
from tests.emu.test_checkpoint import runtime_dir

__all__ = ["runtime_dir"]

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
