"""What a process, a thread and a mapping have of the kernel besides bytes and files."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import pty
import re
import resource
import signal
import struct
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from tests.trials.prelude import Gpu, Here, child, ended, error, libc, ok, program, say, until

DEAD = "the driver would register memory again that is not there any more"
PAGE = 4096
PRIVATE, SHARED, ANONYMOUS, NO_RESERVE = 2, 1, 0x20, 0x4000
CALLS = {"set_mempolicy": 238, "get_mempolicy": 239, "mbind": 237, "keyctl": 250,
         "sched_setattr": 314, "sched_getattr": 315, "unshare": 272, "landlock": 444,
         "landlock_restrict": 446, "kcmp": 312, "madvise": 28}  # fmt: skip

for name, kinds in {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    "mprotect": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "mremap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
}.items():
    getattr(libc, name).argtypes = kinds
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p


def call(name: str, *arguments: Any) -> int | str:
    found = libc.syscall(CALLS[name], *arguments)
    return int(found) if found >= 0 else error()


def prctl(number: int, *arguments: int) -> int | str:
    words = [*arguments, 0, 0, 0, 0][:4]
    found = libc.prctl(number, *[ctypes.c_ulong(word) for word in words])
    return int(found) if found >= 0 else error()


def same(ask: Callable[[], object], here: Here, gpu: Gpu) -> None:
    """Asks before and after; the values are the machine's, so only their equality is said."""
    before = ask()
    say("step", gpu.step())
    here.ready()
    after = ask()
    say("the same" if before == after else f"{before} and then {after}", gpu.step())


def policy() -> tuple[int, int]:
    kind, nodes = ctypes.c_int(-1), ctypes.c_ulong()
    call("get_mempolicy", ctypes.byref(kind), ctypes.byref(nodes), 64, None, 0)
    return kind.value, nodes.value


@program("NUMA policies of the process, of a thread and of a mapping (`numactl`)")
def numa_policies(here: Here) -> None:
    gpu, node = Gpu(), ctypes.c_ulong(1)
    up, ask, asked = (threading.Event() for _ in range(3))
    of_thread: list[object] = []
    mapping = mapped(4 * PAGE)
    ctypes.memset(mapping, 1, 4 * PAGE)
    call("mbind", ctypes.c_void_p(mapping), 4 * PAGE, 2, ctypes.byref(node), 64, 0)

    def other() -> None:
        call("set_mempolicy", 3, ctypes.byref(node), 64)
        while True:
            up.set()
            ask.wait()
            ask.clear()
            of_thread.append(policy())
            asked.set()
            if len(of_thread) == 2:
                return

    thread = threading.Thread(target=other)
    thread.start()
    up.wait()
    call("set_mempolicy", 1, ctypes.byref(node), 64)

    def shown() -> object:
        ask.set()
        asked.wait()
        asked.clear()
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        of_mapping = [line.split()[1] for line in lines if int(line.split()[0], 16) == mapping]
        return policy(), of_thread[-1], of_mapping

    same(shown, here, gpu)
    thread.join()


@program(
    "choices by `prctl`: huge pages, KSM, timer slack, subreaper, capabilities, speculation",
)
def process_choices(here: Here) -> None:
    gpu = Gpu()
    for number, *arguments in [(41, 1), (67, 1), (29, 77777), (36, 1), (38, 1), (8, 1), (33, 1, 1),
                               (53, 0, 2), (1, 15), (47, 4), (24, 25)]:  # fmt: skip
        prctl(number, *arguments)
    libc.prctl(15, b"renamed job", 0, 0, 0)
    os.nice(3)
    os.umask(0o027)
    Path("/proc/self/oom_score_adj").write_text("123")

    def asked(number: int) -> int:
        found = ctypes.c_int()
        libc.prctl(number, ctypes.byref(found), 0, 0, 0)
        return found.value

    def shown() -> object:
        lines = Path("/proc/self/status").read_text().splitlines()
        kept = ("Name", "Umask", "Cap", "NoNewPrivs", "Speculation", "THP", "Groups")
        return (
            {number: prctl(number) for number in (42, 68, 30, 39, 7, 34, 3, 21, 66)},
            (prctl(52, 0), asked(37), asked(2), os.getpriority(os.PRIO_PROCESS, 0)),
            [line for line in lines if line.startswith(kept)],
            Path("/proc/self/oom_score_adj").read_text(),
        )

    same(shown, here, gpu)


@program("memory that may not become executable (`PR_SET_MDWE`)")
def no_new_code(here: Here) -> None:
    gpu = Gpu()
    prctl(65, 1)

    def shown() -> object:
        page = mapped(PAGE)
        return prctl(66), libc.mprotect(page, PAGE, 5)

    same(shown, here, gpu)


@program("a session keyring of its own")
def session_keyring(here: Here) -> None:
    gpu = Gpu()
    made = call("keyctl", 1, here.unique.encode())

    def shown() -> object:
        about = ctypes.create_string_buffer(200)
        call("keyctl", 6, -3, about, 200)
        return about.value.rpartition(b";")[2]

    if isinstance(made, str):
        say("no keyrings")
    same(shown, here, gpu)


def thread_apart(here: Here, flags: int, ask: Callable[[], object]) -> None:
    """A thread with something of its own, and what it has of it before and after."""
    gpu, up, end, said = Gpu(), threading.Event(), threading.Event(), []

    def other() -> None:
        call("unshare", flags)
        said.append(ask())
        up.set()
        end.wait()
        said.append(ask())

    thread = threading.Thread(target=other)
    thread.start()
    up.wait()
    say(said, gpu.step())
    here.ready()
    end.set()
    thread.join()
    say(said, gpu.step())


@program("a thread with a working folder of its own")
def thread_folder(here: Here) -> None:
    (here.folder / "thread").mkdir()
    os.chdir(here.folder)
    entered: list[bool] = []

    def ask() -> object:
        if not entered:
            os.chdir("thread")
            entered.append(True)
        return Path(os.getcwd()).name

    thread_apart(here, 0x200, ask)
    say(Path(os.getcwd()) == here.folder)


@program(
    "a thread with a table of descriptors of its own",
    "refused: CriuUnsupported",
    why="CRIU saves one table for all threads of a process",
)
def thread_descriptors(here: Here) -> None:
    thread_apart(here, 0x400, lambda: len(os.listdir("/proc/thread-self/fd")) > 3)


@program("threads' scheduling: policies, floating-point modes, names, signal masks")
def thread_choices(here: Here) -> None:
    gpu, up, end, said = Gpu(), threading.Event(), threading.Event(), []
    libm = ctypes.CDLL("libm.so.6")

    def shown() -> object:
        environment = ctypes.create_string_buffer(32)
        libm.fegetenv(environment)
        attributes = ctypes.create_string_buffer(56)
        call("sched_getattr", 0, attributes, 56, 0)
        mask = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        modes = struct.unpack_from("I", environment, 28)[0] & ~0x3F
        comm = Path("/proc/thread-self/comm").read_text().strip()
        return hex(modes), struct.unpack_from("IIQi", attributes), mask, comm

    def other() -> None:
        environment = ctypes.create_string_buffer(32)
        libm.fegetenv(environment)
        struct.pack_into("I", environment, 28, 0x9FC0 | 0x6000)  # torch.set_flush_denormal
        libm.fesetenv(environment)
        libc.prctl(15, b"a thread", 0, 0, 0)
        call("sched_setattr", 0, struct.pack("IIQiIQQQ", 48, 5, 1, 0, 0, 0, 0, 0), 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGCHLD})
        said.append(shown())
        up.set()
        end.wait()
        said.append(shown())

    thread = threading.Thread(target=other)
    thread.start()
    up.wait()
    say("step", gpu.step())
    here.ready()
    end.set()
    thread.join()
    say("the same" if said[0] == said[1] else said, gpu.step())


@program(
    "a sandbox by Landlock",
    "refused: Unsupported",
    why="CRIU forgets the sandbox, and a restored process would be free of it",
)
def landlock(here: Here) -> None:
    gpu = Gpu()
    rights = ctypes.c_uint64(1 << 3)  # no folder may be listed
    rules = call("landlock", ctypes.byref(rights), 8, 0)
    prctl(38, 1)
    if isinstance(rules, int):
        call("landlock_restrict", rules, 0)
        os.close(rules)

    def listed() -> str:
        try:
            return f"{bool(os.listdir(here.folder.parent))}"
        except OSError as denied:
            return str(denied.strerror)

    say(listed(), gpu.step())
    here.ready()
    say(listed(), gpu.step())


# Memory


def mapped(size: int, protection: int = 3, flags: int = PRIVATE | ANONYMOUS, fd: int = -1) -> int:
    address = libc.mmap(None, size, protection, flags, fd, 0)
    assert address not in (None, 2**64 - 1), error()
    return int(address)


def put(address: int, data: bytes) -> int:
    ctypes.memmove(address, data, len(data))
    return address


def get(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def flags_of(address: int) -> tuple[str, str]:
    """Rights and flags of the mapping there, without those that come and go by themselves."""
    inside, rights = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
            rights = found[3]
        elif inside and line.startswith("VmFlags"):
            return rights, " ".join({*line.split()[1:]} - {"sd", "ac", "um", "uw"})
    return "none", ""


@program("protected pages with contents, a private copy of a data file, holes, moved mappings")
def odd_memory(here: Here) -> None:
    gpu = Gpu()
    protections = {"none": 0, "read": 1, "execute": 5, "write": 3}
    pages = {}
    for name, protection in protections.items():
        pages[name] = mapped(4 * PAGE)
        put(pages[name] + PAGE, name.encode() * 100)
        libc.mprotect(pages[name], 4 * PAGE, protection)
    data = here.folder / "data"
    data.write_bytes(b"dataset " * 4096)
    fd = os.open(data, os.O_RDWR)
    private, read_only = mapped(8 * PAGE, 3, PRIVATE, fd), mapped(8 * PAGE, 1, PRIVATE, fd)
    beyond = mapped(64 * PAGE, 3, SHARED, fd)
    put(private + PAGE, b"private copy")
    put(beyond + 3 * PAGE, b"shared page")
    moved = libc.mremap(put(mapped(4 * PAGE), b"moved"), 4 * PAGE, 64 * PAGE, 1, None)
    part = mapped(16 * PAGE, 3, SHARED | ANONYMOUS)
    put(part + 9 * PAGE, b"part")
    libc.munmap(part + 4 * PAGE, 4 * PAGE)
    grows = mapped(4 * PAGE, 3, PRIVATE | ANONYMOUS | 0x100)
    say("step", gpu.step())
    here.ready()
    for name, address in pages.items():
        libc.mprotect(address, 4 * PAGE, 1)
        say(name, get(address + PAGE, 2 * len(name)), get(address, 4))
    say(get(private, 8), get(private + PAGE, 12), get(read_only + PAGE, 8))
    say(get(beyond + 3 * PAGE, 11), get(moved, 5), get(part + 9 * PAGE, 4))
    say(get(put(grows, b"grows"), 5), gpu.step())


@program("advice for memory: not to forks, not in dumps, wiped, huge, merged; locked memory")
def advised_memory(here: Here) -> None:
    gpu = Gpu()
    advice = {"wipe": 18, "not to forks": 10, "not in dumps": 16, "huge": 14, "merged": 12}
    places = {}
    for name, number in advice.items():
        places[name] = put(mapped(2 << 20), name.encode())
        libc.madvise(places[name], 2 << 20, number)
    places["locked"] = put(mapped(4 * PAGE), b"locked")
    libc.mlock(ctypes.c_void_p(places["locked"]), 4 * PAGE)
    before = {name: flags_of(address) for name, address in places.items()}
    say("step", gpu.step())
    here.ready()
    for name, address in places.items():
        flags = flags_of(address)
        say(get(address, len(name)), "the same" if flags == before[name] else (before[name], flags))
    say("step", gpu.step())


@program("reservations larger than memory, partly used, in a process that has forked")
def large_reservations(here: Here) -> None:
    """V8, .NET and Go reserve their heaps so."""
    gpu = Gpu()
    middle = mapped(200 << 30, 0)
    libc.mprotect(middle + (50 << 30), 8 << 20, 3)
    put(middle + (50 << 30) + 12345, b"in the middle")
    far = mapped(300 << 30, 3, PRIVATE | ANONYMOUS | NO_RESERVE)
    put(far + (299 << 30), b"far end")
    closed = mapped(100 << 30, 0)
    libc.mprotect(closed, 1 << 20, 3)
    put(closed, b"closed again")
    libc.mprotect(closed, 1 << 20, 0)
    reader, writer = os.pipe()

    def other() -> None:
        libc.mprotect(middle + (150 << 30), 1 << 20, 3)
        put(middle + (150 << 30), b"the child's")
        libc.mprotect(closed, 1 << 20, 3)
        put(closed, b"open in child")
        os.write(writer, b"u")
        here.wait()
        found = get(middle + (150 << 30), 11), get(closed, 13), get(middle + (50 << 30) + 12345, 13)
        os.write(writer, repr(found).encode())

    pid = child(other)
    os.read(reader, 1)
    say("step", gpu.step())
    here.ready()
    say(ended([pid]), os.read(reader, 999))
    libc.mprotect(closed, 1 << 20, 1)
    say(get(middle + (50 << 30) + 12345, 13), get(far + (299 << 30), 7), get(closed, 12))
    say("step", gpu.step())


def registered(address: int, size: int) -> None:
    ok(cu.cuMemHostRegister(address, size, 0))


def registration(address: int) -> object:
    """What the driver says of a registration: a flag, or an error."""
    answer = cu.cuMemHostGetFlags(address)
    return answer[0].name, int(answer[1])


@program("memory registered with the driver (`cuMemHostRegister`), in use")
def live_registration(here: Here) -> None:
    gpu, memory = Gpu(), mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:4] = b"host"
    registered(address, 1 << 20)
    say(registration(address), gpu.step())
    here.ready()
    say(memory[:4], registration(address), gpu.step())
    ok(cu.cuMemHostUnregister(address))


@program(
    "memory that was registered with the driver, and unmapped since",
    {"native": "refused: Unsupported"},
    why=DEAD,
)
def unmapped_registration(here: Here) -> None:
    gpu, address = Gpu(), mapped(1 << 20)
    put(address, b"x")
    registered(address, 1 << 20)
    libc.munmap(address, 1 << 20)
    say(registration(address), gpu.step())
    here.ready()
    say(registration(address), gpu.step())


@program(
    "memory that was registered with the driver, and closed to all access since",
    {"native": "refused: Unsupported"},
    why=DEAD,
)
def closed_registration(here: Here) -> None:
    gpu, address = Gpu(), mapped(1 << 20)
    put(address, b"closed")
    registered(address, 1 << 20)
    libc.mprotect(address, 1 << 20, 0)
    say(registration(address), gpu.step())
    here.ready()
    libc.mprotect(address, 1 << 20, 3)
    say(get(address, 6), registration(address), gpu.step())


@program(
    "memory of a file that was registered with the driver, and shrunk since",
    {"native": "refused: Unsupported"},
    why=DEAD,
)
def shrunk_registration(here: Here) -> None:
    gpu, file = Gpu(), os.memfd_create("shrinks")
    os.ftruncate(file, 1 << 20)
    address = mapped(1 << 20, 3, SHARED, file)
    put(address, b"head")
    registered(address, 1 << 20)
    os.ftruncate(file, PAGE)
    say(registration(address), gpu.step())
    here.ready()
    say(get(address, 4), registration(address), gpu.step())


@program("3000 events of the driver's")
def many_events(here: Here) -> None:
    gpu = Gpu()
    events = [ok(cu.cuEventCreate(2)) for _ in range(3000)]
    ok(cu.cuEventRecord(events[-1], 0))
    say("step", gpu.step())
    here.ready()
    say(int(cu.cuEventQuery(events[-1])[0]), int(cu.cuEventQuery(events[0])[0]), gpu.step())


# Signals, timers and terminals


@program("a sampling profiler: SIGPROF at 1 kHz in threads that use the GPU, `faulthandler`")
def profiler(here: Here) -> None:
    gpu, counts, stop = Gpu(), [0], threading.Event()
    signal.signal(signal.SIGPROF, lambda *_: counts.__setitem__(0, counts[0] + 1))
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    signal.siginterrupt(signal.SIGPROF, True)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    faulthandler.dump_traceback_later(600)

    def work() -> None:
        gpu.current()
        memory = int(ok(cu.cuMemAlloc(4 * 4096)))
        while not stop.is_set():
            gpu.launch(memory, 1)
            ok(cu.cuCtxSynchronize())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    say("step", gpu.step())
    here.ready()
    before = counts[0]
    say("goes on", until(lambda: counts[0] > before + 20))
    stop.set()
    for thread in threads:
        thread.join()
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    faulthandler.cancel_dump_traceback_later()
    say("step", gpu.step())


@program("a thread that waits for signals, alternate stacks, signals that are blocked and pending")
def signals(here: Here) -> None:
    gpu, got = Gpu(), []
    numbers = {signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*numbers, signal.SIGTERM})

    def wait() -> None:
        for _ in range(2):
            got.append(signal.sigwait(numbers).name)

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    until(lambda: got)
    os.kill(os.getpid(), signal.SIGTERM)
    say(got, gpu.step())
    here.ready()
    os.kill(os.getpid(), signal.SIGUSR2)
    thread.join()
    say(got, signal.sigwait({signal.SIGTERM}).name, gpu.step())


@program(
    "a terminal of its own with a shell in it, in raw mode, with a size and unread input",
    pending="a line that is half typed in a terminal is lost without a word",
)
def terminal(here: Here) -> None:
    gpu = Gpu()
    pid, master = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", "stty -echo; echo up; read line; echo got $line; exit 4"])
    seen = b""
    while b"up" not in seen:
        seen += os.read(master, 100)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    os.write(master, b"half a ")
    say("step", gpu.step())
    here.ready()
    size = fcntl.ioctl(master, termios.TIOCGWINSZ, bytes(8))
    os.write(master, b"line\n")
    seen = b""
    while b"line" not in seen:
        seen += os.read(master, 100)
    say(struct.unpack("HH", size[:4]), seen.strip(), ended([pid]), gpu.step())


@program("a limit on its processor time, and times that it has used")
def used_time(here: Here) -> None:
    gpu = Gpu()
    until(lambda: sum(range(100000)) and os.times().user > 0.3)
    resource.setrlimit(resource.RLIMIT_CPU, (600, 700))
    say("step", gpu.step())
    here.ready()
    say(resource.getrlimit(resource.RLIMIT_CPU), os.times().user < 100, gpu.step())
