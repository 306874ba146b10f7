"""Programs that take from themselves what a task needs to find its coordinator again."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from cuda.bindings import driver as cu

from tests.trials.prelude import Gpu, Here, error, libc, ok, program, say, until

UNREACHABLE = "refused: Unreachable"
FORBIDDEN = "it has forbidden itself what a task needs to find its coordinator again"
NO_ROOM = "it has not the descriptors that a task needs to find its coordinator again"
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
NUMBER, ARGUMENT = 0, 16  # places in struct seccomp_data
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x50000 | 1
CALLS = {"socket": 41, "connect": 42, "mount": 165, "keyctl": 250, "ptrace": 101, "kexec": 246,
         "memfd": 319, "io_uring": 425, "userfaultfd": 323, "read_memory": 310}  # fmt: skip
SECCOMP, EVERY_THREAD = 317, 1


def seccomp(rules: Sequence[tuple[int, int, int, int]], flags: int = EVERY_THREAD) -> None:
    code = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (RETURN, 0, 0, ALLOW)])
    held = ctypes.create_string_buffer(code)
    program_ = struct.pack("HxxxxxxQ", len(rules) + 1, ctypes.addressof(held))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, error()
    assert libc.syscall(SECCOMP, 1, flags, program_) == 0, error()


def without(*calls: str, action: int = DENY) -> list[tuple[int, int, int, int]]:
    rules = [(LOAD, 0, 0, NUMBER)]
    for call in calls:
        rules += [(EQUALS, 0, 1, CALLS[call]), (RETURN, 0, 0, action)]
    return rules


def filters() -> list[str]:
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("Seccomp", "NoNewPrivs"))]


def filtered(here: Here, rules: list[tuple[int, int, int, int]]) -> None:
    gpu = Gpu()
    seccomp(rules)
    say(*filters(), gpu.step())
    here.ready()
    say(*filters(), libc.mount(b"a", b"b", b"c", 0, 0), gpu.step())


@program("a seccomp filter that forbids sockets", UNREACHABLE, why=FORBIDDEN)
def seccomp_sockets(here: Here) -> None:
    filtered(here, without("socket", "connect"))


@program("a seccomp filter that forbids Unix sockets alone", UNREACHABLE, why=FORBIDDEN)
def seccomp_unix_sockets(here: Here) -> None:
    family = [(LOAD, 0, 0, NUMBER), (EQUALS, 0, 3, CALLS["socket"]), (LOAD, 0, 0, ARGUMENT)]
    filtered(here, [*family, (EQUALS, 0, 1, 1), (RETURN, 0, 0, DENY)])


@program("a seccomp filter of a sandbox: mount, ptrace, keyrings, io_uring")
def seccomp_sandbox(here: Here) -> None:
    filtered(here, without("ptrace", "kexec", "mount", "keyctl", "io_uring", "userfaultfd"))


@program("a seccomp filter that ends whoever asks for a socket", UNREACHABLE, why=FORBIDDEN)
def seccomp_kills(here: Here) -> None:
    gpu = Gpu()
    seccomp(without("socket", "connect", "memfd", "read_memory", action=KILL))
    say(*filters(), gpu.step())
    here.ready()
    say(*filters(), gpu.step())


@program("a seccomp filter of one thread")
def seccomp_thread(here: Here) -> None:
    gpu, up, stop, said = Gpu(), threading.Event(), threading.Event(), []

    def other() -> None:
        seccomp(without("mount"), 0)
        up.set()
        stop.wait()
        said.append((*filters(), libc.mount(b"a", b"b", b"c", 0, 0), error()))

    thread = threading.Thread(target=other)
    thread.start()
    up.wait()
    say(*filters(), gpu.step())
    here.ready()
    stop.set()
    thread.join()
    say(*filters(), said, gpu.step())


@program(
    "`chroot` after it has begun to use the GPU",
    UNREACHABLE,
    why="its new root folder has no `/proc`",
)
def chroot(here: Here) -> None:
    gpu, root = Gpu(), here.folder / "root"
    root.mkdir()
    # The word to go on comes outside.
    watcher = os.open(here.go.parent, os.O_RDONLY)
    name = here.go.name
    os.chroot(root)
    os.chdir("/")
    say("step", gpu.step())
    say("ready")
    until(lambda: name in os.listdir(watcher), 60)
    say("root", os.listdir("/"), gpu.step())


@program(
    "a process title written over its arguments and environment, as setproctitle does",
)
def process_title(here: Here) -> None:
    gpu = Gpu()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # From arg_start to env_end, fields 48 and 51 of proc(5); the list begins with the third.
    begin, end = int(fields[45]), int(fields[48])
    title = b"engine: worker 0"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, title, len(title))
    libc.prctl(15, b"engine", 0, 0, 0)

    def shown() -> bytes:
        return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0")

    say(shown(), gpu.step())
    here.ready()
    say(shown(), Path("/proc/self/comm").read_text().strip(), gpu.step())


@program("an environment that it has cleared")
def cleared_environment(here: Here) -> None:
    gpu = Gpu()
    os.environ.clear()
    libc.clearenv()
    say(dict(os.environ), gpu.step())
    here.ready()
    say(dict(os.environ), gpu.step())


def blocks(gpu: Gpu, count: int) -> list[int]:
    made = [int(ok(cu.cuMemAlloc(3 << 20))) for _ in range(count)]
    for number, memory in enumerate(made):
        ok(cu.cuMemsetD8(memory, number % 251, 4096))
    return made


def tell(gpu: Gpu, made: Sequence[int]) -> None:
    say("memory", len({gpu.digest(memory, 4096) for memory in made}), gpu.step())


@program("a limit of 64 descriptors, and many allocations", UNREACHABLE, why=NO_ROOM)
def few_descriptors(here: Here) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    gpu = Gpu()
    made = blocks(gpu, 100)
    tell(gpu, made)
    here.ready()
    tell(gpu, made)


@program("all descriptors that its limit allows in use", UNREACHABLE, why=NO_ROOM)
def no_descriptor_left(here: Here) -> None:
    gpu = Gpu()
    made = blocks(gpu, 5)
    tell(gpu, made)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, highest + 20))
    taken = []
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    say("ready")
    # Looking for the word takes no descriptor.
    here.wait()
    tell(gpu, made)
    say(len(taken) > 5, sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in taken[:1]))


@program("`closefrom(3)` before it uses the GPU, as daemons do")
def closed_before(here: Here) -> None:
    os.closerange(3, 65536)
    gpu = Gpu()
    made = blocks(gpu, 5)
    tell(gpu, made)
    here.ready()
    tell(gpu, made)


@program("1500 open files, and 60 allocations")
def many_descriptors(here: Here) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gpu = Gpu()
    made = blocks(gpu, 60)
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
    tell(gpu, made)
    here.ready()
    tell(gpu, made)
    say(len(files), os.fstat(files[-1]).st_rdev == os.stat("/dev/null").st_rdev)


@program("a file-size limit of a few pages (`ulimit -f`)")
def small_files(here: Here) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    gpu = Gpu()
    made = blocks(gpu, 5)
    tell(gpu, made)
    here.ready()
    tell(gpu, made)
    say(resource.getrlimit(resource.RLIMIT_FSIZE))
