"""What processes, threads and sockets have set in the kernel is as before in a restored job, is
refused by name before the pause, or is named by the report. Real CRIU, emulated GPU.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import DUMPED_EXIT, FileMissing, Unsupported
from flowgpu.host import sandbox
from flowgpu.image.reader import Image
from tests.emu.gpu_job import GPU
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu
from tests.unit.coordinator_job import wait_for

# Lists what a thread can ask of itself, and what /proc says of it, as a dictionary.
FACTS = r"""
import ctypes, os, re, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
PRCTL, GET_MEMPOLICY, KEYCTL, IOPRIO_GET, SCHED_GETATTR, KCMP = 157, 239, 250, 252, 315, 312
# linux/prctl.h: options that answer, and those that write an int (or a name, an address)
ANSWERING = [3, 7, 9, 11, 13, 21, 27, 30, 34, 39, 42, 46, 51, 56, 58, 64, 66, 68, 74]
WRITING = [2, 5, 16, 19, 25, 37, 40]
def asked(number, *arguments):
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    return result if result >= 0 else f"error {ctypes.get_errno()}"
def written(number, size, *arguments):
    buffer = ctypes.create_string_buffer(size)
    at = ctypes.addressof(buffer)
    result = asked(number, *[at if word is None else word for word in arguments])
    return result, buffer.raw.hex()
def policies():
    first, *lines = open(f"/proc/{libc.gettid()}/numa_maps").read().splitlines()
    found = re.findall(r"^(\w+) (prefer \(many\)\S*|\S+)", "\n".join([first, *lines]), re.M)
    own = {}
    for start, text in found:
        size = 8 + 136
        answer = written(GET_MEMPOLICY, size, None, 0, 0, int(start, 16), 2)
        if text != "default" and answer[1][:8] != "00000000":
            own[start] = text
    return own
def facts():
    tid, folder = libc.gettid(), f"/proc/thread-self"
    found = {f"prctl {n}": asked(PRCTL, n, 0, 0, 0, 0) for n in ANSWERING}
    found |= {f"prctl {n}": written(PRCTL, 16, n, None, 0, 0, 0) for n in WRITING}
    found |= {f"speculation {n}": asked(PRCTL, 52, n, 0, 0, 0) for n in range(3)}
    found["bounding"] = [asked(PRCTL, 23, n, 0, 0, 0) for n in range(41)]
    found["ambient"] = [asked(PRCTL, 47, 1, n, 0, 0) for n in range(41)]
    mask = ctypes.create_string_buffer(256)
    mode = ctypes.c_int()
    assert libc.syscall(GET_MEMPOLICY, ctypes.byref(mode), mask, 1025, None, 0) == 0
    found["policy"] = mode.value, mask.raw.rstrip(b"\0").hex()
    found["io priority"] = asked(IOPRIO_GET, 1, 0)
    found["scheduler"] = written(SCHED_GETATTR, 56, 0, None, 56, 0)
    for name, keyring in ("session", -3), ("process", -2), ("thread", -1):
        text = bytes.fromhex(written(KEYCTL, 200, 6, keyring, None, 200)[1]).rstrip(b"\0").decode()
        found[f"{name} keyring"] = text
    for name in "personality", "comm", "cgroup", "oom_score_adj", "loginuid":
        found[name] = open(f"{folder}/{name}").read()
    for name in "timerslack_ns", "coredump_filter", "autogroup", "limits":
        found[name] = re.sub("autogroup-[0-9]+", "", open(f"/proc/{tid}/{name}").read())
    kept = "Umask|Groups|Cap...|NoNewPrivs|Seccomp|Spec|THP|Mems|Cpus|Sig(Ign|Cgt|Blk)"
    status = open(f"{folder}/status").read().splitlines()
    found["status"] = [line for line in status if re.match(kept, line)]
    found["cwd"], found["root"] = os.readlink(f"{folder}/cwd"), os.readlink(f"{folder}/root")
    for name, kind in ("vm", 1), ("files", 2), ("fs", 3), ("sighand", 4), ("sysvsem", 6):
        found[f"shares {name}"] = asked(KCMP, os.getpid(), tid, kind, 0, 0) == 0
    return found
"""

# What a thread and its process can set, all of it unlike what CRIU gives them.
SETTING = """
def done(result):
    assert result >= 0, os.strerror(ctypes.get_errno())
def set_for_thread(mode, slack):
    one = ctypes.c_ulong(1)
    done(libc.syscall(238, mode, ctypes.byref(one), 64))  # set_mempolicy
    done(libc.prctl(29, slack, 0, 0, 0))
    done(libc.prctl(33, 1, 1, 0, 0))  # it is told of a failing page early
    if libc.prctl(52, 0, 0, 0, 0) & 1:  # where the processor lets a process choose
        done(libc.prctl(53, 0, 4, 0, 0))  # stores are not bypassed
    done(libc.syscall(251, 1, 0, (2 << 13) | 3))  # ioprio_set
    done(libc.personality(0x0040000))  # ADDR_NO_RANDOMIZE
    done(libc.syscall(250, 1, b"flowgpu-test"))  # a session keyring
def set_for_process():
    libc.mmap.restype, one = ctypes.c_void_p, ctypes.c_ulong(1)
    for flags, offset, mode in (0x21, 0, 3), (0x22, 4096, 2 | 1 << 15):
        at = libc.mmap(None, 16 << 12, 3, flags, -1, 0) + offset
        libc.memset(ctypes.c_void_p(at), 1, 4096)
        done(libc.syscall(237, ctypes.c_void_p(at), 4096, mode, ctypes.byref(one), 64, 0))  # mbind
    done(libc.prctl(67, 1, 0, 0, 0))  # KSM
    open("/proc/self/coredump_filter", "w").write("0x3f")
"""

# A process without the GPU tells when it is asked.
CHILD = (
    FACTS
    + SETTING
    + """
import json, sys
set_for_thread(1, 66666)
set_for_process()
for _ in sys.stdin:
    print(json.dumps({"child": facts(), "child's mappings": policies()}), flush=True)
"""
)

# The second argument is the child, the third one `mdwe`, or not there.
SET = (
    GPU
    + FACTS
    + SETTING
    + """
import json, threading
folder = sys.argv[1] + ".thread"
os.mkdir(folder)
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True, bufsize=1)
told = {}
def tell_all():
    told.update(main=facts(), mappings=policies())
    turn.wait()
    turn.wait()
    child.stdin.write("tell" + os.linesep)
    told.update(json.loads(child.stdout.readline()))
    for name, found in told.items():
        for key, value in found.items():
            print(name, "|", key, "|", value)
    print("gpu", gpu())
def other():
    set_for_thread(3, 88888)
    done(libc.unshare(0x200))  # CLONE_FS
    os.umask(0o027)
    os.chdir(folder)
    for _ in range(2):
        turn.wait()
        told["thread"] = facts()
        turn.wait()
turn = threading.Barrier(2)
set_for_thread(1 | 1 << 15, 77777)
set_for_process()
thread = threading.Thread(target=other)
thread.start()
if sys.argv[3:]:
    done(libc.prctl(65, 1, 0, 0, 0))
tell_all()
went()
print("again")
tell_all()
thread.join()
child.stdin.close()
"""
)


@contextmanager
def job(
    name: str, program: str, folder: Path, *arguments: str, engine: str = "auto"
) -> Iterator[Any]:
    """A job that is ready; gives what says its lines so far, and its process."""
    out = folder / f"{name}.out"
    chosen = ["--gpu", "emulated", "--engine", engine, "--name", name]
    words = [*FLOWGPU, "run", *chosen, "--", sys.executable, "-c", program, str(folder / "go")]
    with (
        open(out, "wb") as output,
        subprocess.Popen([*words, *arguments], cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for(
                lambda: "ready\n" in out.read_text() or process.poll() is not None, "ready", SECONDS
            )
            assert process.poll() is None, out.read_text()
            yield lambda: out.read_text().splitlines(), process
        finally:
            flowgpu("kill", name)


def facts_of(lines: list[str]) -> dict[tuple[str, str], str]:
    found = {}
    for line in lines:
        if line.count(" | ") >= 2:
            name, key, value = line.split(" | ", 2)
            found[name, key] = value
    return found


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("kind", ["", "mdwe"])
def test_what_threads_have_of_the_kernel_is_as_before(
    kind: str, engine: str, tmp_path: Path
) -> None:
    with job(f"set-{engine}{kind}", SET, tmp_path, CHILD, *kind.split(), engine=engine) as (
        said,
        run,
    ):
        done = flowgpu("pause-and-dump", f"set-{engine}{kind}", "--output", tmp_path / "image")
        assert done.returncode == 0, done.stderr
        assert run.wait(SECONDS) == DUMPED_EXIT
        before = facts_of(said())
    (tmp_path / "go").touch()
    for _ in ("it restores", "again"):
        restored = flowgpu("restore", tmp_path / "image")
        assert restored.returncode == 0, restored.stderr
        assert "not set" not in restored.stderr
        lines = restored.stdout.splitlines()
        assert lines[0] == "again"
        assert lines[-1] == "gpu True"
        after = facts_of(lines)
        changed = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
        assert {key: pair for key, pair in changed.items() if pair[0] != pair[1]} == {}
    # All of that was there to lose.
    for name, slack, policy in (
        ("main", 77777, 1 | 1 << 15),
        ("thread", 88888, 3),
        ("child", 66666, 1),
    ):
        assert before[name, "prctl 30"] == str(slack)
        assert before[name, "policy"].strip("[()]") == f"{policy}, '01'"
        assert before[name, "prctl 34"] == "1"
        assert before[name, "prctl 68"] == "1"
        assert before[name, "prctl 66"] == str(int(bool(kind) and name != "child"))
        assert before[name, "speculation 0"] in ("5", "error 22", "2")
        assert before[name, "io priority"] == str((2 << 13) | 3)
        assert before[name, "session keyring"].endswith(";flowgpu-test")
        assert before[name, "coredump_filter"].strip() == "0000003f"
        assert before[name, "shares fs"] == str(name != "thread")
    mappings = {
        name: sorted(text for (n, _), text in before.items() if n == name)
        for name in ("mappings", "child's mappings")
    }
    assert mappings == {key: ["bind=static:0", "interleave:0"] for key in mappings}
    assert before["thread", "cwd"] == str(tmp_path / "go.thread")


# In a Landlock sandbox of a kind: of files, of the network, of signals. A `thread` alone, or a
# `child` that does not use the GPU.
SANDBOXED = (
    GPU
    + """
import threading
def enter():
    kind = {"files": (1 << 3, 0, 0), "network": (0, 1, 0), "signals": (0, 0, 2)}[sys.argv[2]]
    rules = libc.syscall(444, (ctypes.c_uint64 * 3)(*kind), 24, 0)
    assert rules > 0, ctypes.get_errno()
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.syscall(446, rules, 0) == 0
    os.close(rules)
def wait_in_it():
    enter()
    entered.set()
    print("epoll", libc.epoll_wait(libc.epoll_create1(0), ctypes.create_string_buffer(64), 4, -1))
entered = threading.Event()
if sys.argv[3:] == ["thread"]:
    threading.Thread(target=wait_in_it, daemon=True).start()
    entered.wait()
elif sys.argv[3:] == ["child"]:
    child = subprocess.Popen(["sleep", "1000"], preexec_fn=enter)
else:
    enter()
went()
print("gpu", gpu(), flush=True)
os._exit(0)
"""
)

needs_landlock = pytest.mark.skipif(not sandbox.is_supported(), reason="there is no Landlock here")


@needs_landlock
@pytest.mark.parametrize(
    "kind", [["files"], ["network"], ["signals"], ["network", "thread"], ["signals", "child"]]
)
def test_a_landlock_sandbox_is_refused_before_the_pause(kind: list[str], tmp_path: Path) -> None:
    name = "-".join(["sandbox", *kind])
    with job(name, SANDBOXED, tmp_path, *kind) as (said, run):
        done = flowgpu("pause-and-dump", name, "--output", tmp_path / "image", "--json")
        assert done.returncode == Unsupported.exit_code, done.stderr
        assert "a Landlock sandbox (process " in done.stderr
        assert "The job runs on as before" in done.stderr
        assert not (tmp_path / "image").exists()
        (tmp_path / "go").touch()
        assert run.wait(SECONDS) == 0
        assert said() == ["ready", "gpu True"]


LISTENING = (
    GPU
    + """
import socket
sockets = {}
def made(name, family, kind, address=None):
    it = sockets[name] = socket.socket(family, kind)
    if address:
        it.bind(address)
    return it
here = ("127.0.0.1", 0)
server = made("server", socket.AF_INET, socket.SOCK_STREAM)
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3)
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
server.bind(here)
server.listen(7)
waited = made("waited", socket.AF_INET, socket.SOCK_STREAM, here)
waited.listen(7)
unread = made("unread", socket.AF_INET, socket.SOCK_DGRAM, here)
unread.setsockopt(socket.SOL_SOCKET, 40, 1)  # SO_RXQ_OVFL
group = made("group", socket.AF_INET, socket.SOCK_DGRAM, ("", 0))
joined = socket.inet_aton("239.1.2.3") + socket.inet_aton("127.0.0.1")
group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
source = socket.inet_aton("239.1.2.4") + socket.inet_aton("127.0.0.1") * 2
group.setsockopt(socket.IPPROTO_IP, 39, source)  # IP_ADD_SOURCE_MEMBERSHIP
six = made("six", socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 0))
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 9)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP,
               socket.inet_pton(socket.AF_INET6, "ff12::77") + struct.pack("=I", 1))
made("unix", socket.AF_UNIX, socket.SOCK_DGRAM).setsockopt(socket.SOL_SOCKET, 42, 3)
netlink = made("netlink", socket.AF_NETLINK, socket.SOCK_RAW)
netlink.setsockopt(270, 3, 1)  # NETLINK_PKTINFO
def options():
    levels = {1: range(1, 84), 0: range(1, 52), 41: range(1, 82), 6: range(1, 48)}
    levels |= {17: range(100, 106), 270: range(1, 13)}
    # What is no setting: type, error, peer, cookie, memory, processor, information and clock of
    # TCP, options of the last packet, MTU.
    told = {1: {3, 4, 17, 28, 30, 31, 38, 39, 55, 56, 57, 59, 77}, 6: {11, 24, 26, 28, 35, 36},
            0: {9, 14}, 41: {6, 24}, 270: set(), 17: set()}
    for name, it in sockets.items():
        for level, numbers in levels.items():
            for number in set(numbers) - told[level]:
                try:
                    yield f"{name} {level} {number}", it.getsockopt(level, number, 64).hex()
                except OSError:
                    pass
def multicast(address):
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    sender.sendto(b"all of you", (address, group.getsockname()[1]))
    return select.select([group], [], [], 5)[0] and group.recv(20)
before = dict(options())
print("multicast", multicast("239.1.2.3"), multicast("239.1.2.4"))
watched = open(sys.argv[1] + ".watched", "w")
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, watched.name.encode(), 0xFFF) == 1
os.unlink(watched.name)
print("ports", waited.getsockname()[1], unread.getsockname()[1])
print("fds", waited.fileno(), unread.fileno(), watch)
went()
after = dict(options())
print("options", {k: (v, after.get(k)) for k, v in before.items() if after.get(k) != v})
print("multicast", multicast("239.1.2.3"), multicast("239.1.2.4"))
print("gpu", gpu())
"""
)


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_sockets_are_as_before_and_what_they_lose_is_told(engine: str, tmp_path: Path) -> None:
    name, image = f"sockets-{engine}", tmp_path / "image"
    with job(name, LISTENING, tmp_path, engine=engine) as (said, run):
        received, ports, fds = (line.split() for line in said()[:3])
        assert " ".join(received) == "multicast b'all of you' b'all of you'"
        client = socket.create_connection(("127.0.0.1", int(ports[1])))
        with client, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"unread", ("127.0.0.1", int(ports[2])))
            done = flowgpu("pause-and-dump", name, "--output", image, "--leave-running", "--json")
            assert done.returncode == 0, done.stderr
            (tmp_path / "go").touch()
            assert run.wait(SECONDS) == 0
            end = ["options {}", f"multicast {' '.join(received[1:])}", "gpu True"]
            assert said()[-3:] == end
    (waited, unread, watch), pid = fds[1:], Image(image).manifest.root_pid
    not_kept = [
        f"process {pid}: clients that the socket as fd {waited} had not accepted",
        f"process {pid}: events of inotify as fd {watch} that were not read",
        f"process {pid}: the watch 1 of inotify as fd {watch}, of a deleted file",
        f"process {pid}: what had come to the socket as fd {unread} and was not read",
    ]
    assert sorted(json.loads(done.stdout)["not_kept"]) == not_kept
    inspected = flowgpu("inspect", image)
    assert all(text in inspected.stdout for text in not_kept)
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines() == end
    assert "not set" not in restored.stderr


def test_a_dump_says_what_its_image_lacks(tmp_path: Path) -> None:
    program = (
        GPU
        + """
import socket
it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
it.bind(("127.0.0.1", 0))
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"unread", it.getsockname())
print("fd", it.fileno())
went()
"""
    )
    with job("lacking", program, tmp_path) as (said, run):
        done = flowgpu("pause-and-dump", "lacking", "--output", tmp_path / "image")
        assert done.returncode == 0, done.stderr
        assert run.wait(SECONDS) == DUMPED_EXIT
        fd = said()[0].split()[1]
    (line,) = [line for line in done.stderr.splitlines() if "not in the image" in line]
    assert re.fullmatch(
        rf"flowgpu: not in the image: process \d+: what had come to the socket as fd {fd} and was "
        "not read",
        line,
    )


WATCHING = (
    GPU
    + """
folder = sys.argv[2]
os.mkdir(folder, 0o750)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, folder.encode(), 0x100) == 1  # IN_CREATE
went()
with open(folder + "/new", "w"):
    print("created", os.read(watch, 100)[16:19])
print("mode", oct(os.stat(folder).st_mode))
os.unlink(folder + "/new")
os.rmdir(folder)
print("gpu", gpu())
"""
)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_watched_folder_in_memory_is_there_at_each_restore(
    in_memory: Path, tmp_path: Path
) -> None:
    folder, image = in_memory / "watched", tmp_path / "image"
    with job("watching", WATCHING, tmp_path, str(folder)) as (_, run):
        done = flowgpu("pause-and-dump", "watching", "--output", image)
        assert done.returncode == 0, done.stderr
        assert run.wait(SECONDS) == DUMPED_EXIT
    (tmp_path / "go").touch()
    for _ in range(2):
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.splitlines() == ["created b'new'", "mode 0o40750", "gpu True"]
        assert not folder.exists()


def test_a_watched_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    folder, image = tmp_path / "watched", tmp_path / "image"
    with job("missing", WATCHING, tmp_path, str(folder)) as (_, run):
        done = flowgpu("pause-and-dump", "missing", "--output", image)
        assert done.returncode == 0, done.stderr
        assert run.wait(SECONDS) == DUMPED_EXIT
    folder.rmdir()
    restored = flowgpu("restore", image)
    assert restored.returncode == FileMissing.exit_code, restored.stderr
    assert str(folder) in restored.stderr


# The filter ends the process at each call with which it is asked or set: get_mempolicy, keyctl,
# get_robust_list, set_mempolicy, mbind, kcmp.
FILTERED = (
    GPU
    + """
one = ctypes.c_ulong(1)
assert libc.syscall(238, 1, ctypes.byref(one), 64) == 0
assert libc.prctl(29, 77777, 0, 0, 0) == 0
def rule(code, true, false, value):
    return struct.pack("HBBI", code, true, false, value)
rules = rule(0x20, 0, 0, 0)  # the number of the call
for number in 237, 238, 239, 250, 274, 312:
    rules += rule(0x15, 0, 1, number) + rule(0x06, 0, 0, 0x80000000)
rules += rule(0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(rules)
program = struct.pack("HxxxxxxQ", len(rules) // 8, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
def tell():
    policy = open("/proc/self/numa_maps").readline().split()[1]
    filters = [line for line in open("/proc/self/status") if line.startswith("Seccomp:")]
    print(policy, libc.prctl(30, 0, 0, 0, 0), filters, gpu())
tell()
went()
tell()
"""
)


def test_a_filter_that_forbids_the_questions_harms_nobody(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with job("filtered", FILTERED, tmp_path) as (said, run):
        done = flowgpu("pause-and-dump", "filtered", "--output", image)
        assert done.returncode == 0, done.stderr
        assert run.wait(SECONDS) == DUMPED_EXIT
        before = said()[0]
    assert before == r"prefer:0 77777 ['Seccomp:\t2\n'] True"
    (tmp_path / "go").touch()
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines() == [before]
