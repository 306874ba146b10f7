"""What CRIU cannot dump is found while the job runs."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from flowgpu.host.probes import libc
from flowgpu.host.proctree import thread_state, tree_pids
from flowgpu.host.undumpable import (
    LONGEST_DELETED,
    NAMESPACES,
    SCHED_DEADLINE,
    outside_socket,
    undumpable,
)
from flowgpu.jobs import start_time
from tests.unit.coordinator_job import wait_for

SYS_USERFAULTFD, USER_MODE_ONLY = 323, 1
SYS_SCHED_SETATTR = 314
SYS_MEMFD_SECRET = 447
CLONE_FS = 0x200
CLONE_FLAGS = dict(
    zip(
        NAMESPACES,
        (0x2000000, 0x8000000, 0x20000, 0x40000000, 0x20000000, 0x80, 0x10000000, 0x4000000),
        strict=True,
    )
)


@pytest.fixture
def opened() -> Iterator[Callable[[int], int]]:
    """Closes the descriptors that it is given."""
    fds: list[int] = []

    def keep(fd: int) -> int:
        assert fd >= 0, os.strerror(ctypes.get_errno())
        fds.append(fd)
        return fd

    yield keep
    for fd in fds:
        os.close(fd)


def test_what_criu_dumps_is_not_named(opened: Callable[[int], int]) -> None:
    with select.epoll(), tempfile.TemporaryFile():
        for fd in (*os.pipe(), *os.openpty(), os.eventfd(0), os.memfd_create("x")):
            opened(fd)
        opened(os.pidfd_open(os.getpid()))
        opened(os.open("/dev/null", os.O_RDWR))
        assert undumpable([os.getpid()]) == ""


def test_an_anonymous_inode_of_another_kind_is_named(opened: Callable[[int], int]) -> None:
    fd = opened(libc().syscall(SYS_USERFAULTFD, os.O_CLOEXEC | USER_MODE_ONLY))
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            found = undumpable([other.pid, os.getpid()])
        finally:
            other.kill()
    assert found == f"a userfaultfd as fd {fd} (process {os.getpid()})"


def test_an_eventfd_that_is_a_semaphore_is_named(opened: Callable[[int], int]) -> None:
    fd = opened(os.eventfd(2, os.EFD_SEMAPHORE))
    if "eventfd-semaphore" not in Path(f"/proc/self/fdinfo/{fd}").read_text():
        pytest.skip("a kernel older than 6.5 does not tell")
    found = undumpable([os.getpid()])
    assert found == f"an eventfd semaphore (EFD_SEMAPHORE) as fd {fd} (process {os.getpid()})"


def alarm() -> int:
    fd: int = libc().timerfd_create(9, 0)  # CLOCK_BOOTTIME_ALARM, which needs CAP_WAKE_ALARM
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


DESCRIPTORS: dict[str, Callable[[], Iterable[int]]] = {
    "a pipe of packets (O_DIRECT)": lambda: os.pipe2(os.O_DIRECT),
    "a timerfd of a clock that wakes the machine": lambda: [alarm()],
    "a socket of the protocol MPTCP": lambda: [socket.socket(proto=262).detach()],
    "a socket of the protocol AF_VSOCK": lambda: [socket.socket(socket.AF_VSOCK).detach()],
    "/dev/net/tun": lambda: [os.open("/dev/net/tun", os.O_RDWR)],
}


@pytest.mark.parametrize("what", DESCRIPTORS)
def test_a_descriptor_that_criu_fails_at_is_named(what: str, opened: Callable[[int], int]) -> None:
    try:
        fds = [opened(fd) for fd in DESCRIPTORS[what]()]
    except OSError as error:
        pytest.skip(f"this machine opens no such thing: {error}")
    assert undumpable([os.getpid()]) == f"{what} as fd {max(fds)} (process {os.getpid()})"


def test_a_message_queue_is_named(opened: Callable[[int], int]) -> None:
    name, library = f"/flowgpu-{os.getpid()}", ctypes.CDLL("librt.so.1")
    fd = opened(library.mq_open(name.encode(), os.O_CREAT | os.O_RDWR, 0o600, None))
    library.mq_unlink(name.encode())
    wanted = f"the message queue {name} (deleted) as fd {fd} (process {os.getpid()})"
    assert undumpable([os.getpid()]) == wanted


def test_shared_memory_of_system_v_is_named() -> None:
    library = libc()
    library.shmat.restype = ctypes.c_void_p
    key = library.shmget(0, mmap.PAGESIZE, 0o600 | 0o1000)  # IPC_PRIVATE, IPC_CREAT
    address = ctypes.c_void_p(library.shmat(key, None, 0))
    library.shmctl(key, 0, None)  # IPC_RMID: it ends with its last mapping
    found = undumpable([os.getpid()])
    assert library.shmdt(address) == 0
    assert found == f"shared memory of System V (shmget) (process {os.getpid()})"
    assert undumpable([os.getpid()]) == ""


def test_secret_memory_is_named() -> None:
    fd = libc().syscall(SYS_MEMFD_SECRET, 0)
    if fd < 0:
        pytest.skip(f"no secret memory: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE):
        os.close(fd)
        found = undumpable([os.getpid()])
    assert found == f"secret memory (memfd_secret) (process {os.getpid()})"


@pytest.mark.parametrize("thread", [False, True], ids=["process", "thread"])
@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_namespace_of_its_own_is_named(kind: str, thread: bool) -> None:
    if kind == "user" and thread:
        return  # the kernel refuses a thread one
    # A process gets a PID or time namespace as the child of one that has asked for it.
    words = f"""
import ctypes, os, threading, time
def enter():
    if ctypes.CDLL(None).unshare({CLONE_FLAGS[kind]} | ({CLONE_FS} if {thread} else 0)) != 0:
        print(-1, flush=True)
    elif {kind!r} in ("pid", "time"):
        child = os.fork()
        if child:
            print(child, flush=True)
    else:
        print(threading.get_native_id(), flush=True)
    time.sleep(1000)
threading.Thread(target=enter).start() if {thread} else enter()
"""
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            number = int(process.stdout.readline())
            if number < 0:
                pytest.skip("namespaces cannot be made here")
            tree = tree_pids(process.pid)
            owner = number if number in tree else process.pid
            # A tree whose root has one is dumped, but for these.
            if owner == process.pid and not thread and kind not in ("mnt", "user"):
                assert undumpable(tree) == ""
                tree.insert(0, os.getpid())
            wanted = f"a namespace of its own ({kind}), thread {number}, (process {owner})"
            assert undumpable(tree) == wanted
        finally:
            for pid in tree_pids(process.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_deleted_file_that_has_no_room_for_a_longer_name_is_named(tmp_path: Path) -> None:
    for length in (LONGEST_DELETED, LONGEST_DELETED + 1):
        with open(tmp_path / ("n" * length), "wb") as file:
            assert undumpable([os.getpid()]) == ""
            os.unlink(file.name)
            found = undumpable([os.getpid()])
            wanted = f"a deleted file with a name of more than {LONGEST_DELETED} bytes as fd"
            assert found.startswith(wanted) if length > LONGEST_DELETED else found == ""


def test_a_process_that_is_traced_is_named() -> None:
    child = os.fork()
    if child == 0:
        libc().ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        wanted = f"an attached debugger or tracer, process {os.getpid()}, (process {child})"
        assert undumpable([child]) == wanted
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


ORPHAN = """
import ctypes, os, sys, time
if sys.argv[1] == "subreaper" and os.fork():
    time.sleep(1000)
if sys.argv[1] != "parent":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
middle = os.fork()
if middle == 0:
    if sys.argv[2] == "session":
        os.setsid()
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print(child, flush=True)
    if sys.argv[1] != "parent":
        os._exit(0)
    time.sleep(1000)
if sys.argv[1] != "parent":
    os.waitpid(middle, 0)
print("there", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("above", ["root", "subreaper", "parent"])
@pytest.mark.parametrize("what", ["session", "group"])
def test_an_orphan_of_another_session_that_a_subreaper_below_the_root_has_is_named(
    above: str, what: str
) -> None:
    command = [sys.executable, "-c", ORPHAN, above, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            lines = {process.stdout.readline(), process.stdout.readline()}
            orphan = int(*(lines - {"there\n"}))
            tree = tree_pids(process.pid)
            assert orphan in tree
            wanted = "a session that none of its parents has, through a subreaper"
            named = above == "subreaper" and what == "session"
            assert undumpable(tree) == (f"{wanted} (process {orphan})" if named else "")
        finally:
            for pid in tree_pids(process.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_thread_with_deadlines_is_named() -> None:
    child = subprocess.Popen(["sleep", "100"])
    try:
        # struct sched_attr: size, policy, flags, nice, priority; runtime, deadline, period in ns.
        times = (1_000_000, 10_000_000, 10_000_000)
        attributes = struct.pack("IIQiIQQQ", 48, SCHED_DEADLINE, 0, 0, 0, *times)
        if libc().syscall(SYS_SCHED_SETATTR, child.pid, attributes, 0) != 0:
            pytest.skip(f"deadlines: {os.strerror(ctypes.get_errno())}")
        wanted = f"the scheduling policy SCHED_DEADLINE, thread {child.pid}, (process {child.pid})"
        assert undumpable([child.pid]) == wanted
    finally:
        child.kill()
        child.wait()


def test_a_device_file_is_named(opened: Callable[[int], int], tmp_path: Path) -> None:
    node = tmp_path / "device"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(10, 237))  # that of /dev/loop-control
    try:
        fd = opened(os.open(node, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"this machine opens no such device: {error}")
    assert undumpable([os.getpid()]) == f"{node} as fd {fd} (process {os.getpid()})"


def test_a_process_that_has_ended_holds_nothing() -> None:
    assert undumpable([2**22 + 1]) == ""


def test_a_terminal_of_another_process_is_named(opened: Callable[[int], int]) -> None:
    master, slave = (opened(fd) for fd in os.openpty())
    child = subprocess.Popen(["sleep", "1000"], stdin=slave, stdout=slave)
    try:
        who = f"{os.ttyname(slave)}, the terminal of a process outside the job, as fd 0"
        assert undumpable([child.pid]) == f"{who} (process {child.pid})"
        assert undumpable([os.getpid(), child.pid]) == ""
    finally:
        child.kill()
        child.wait()
    assert os.isatty(master)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_is_named_by_its_outside_end_and_none_within(kind: int) -> None:
    one, other = socket.socketpair(type=kind)
    ends = {os.fstat(end.fileno()).st_ino for end in (one, other)}

    def not_these(peer: int, path: bytes) -> bool:  # a process of tests has others
        return peer not in ends

    child = subprocess.Popen(["sleep", "1000"], stdin=one)
    try:
        one.close()
        said = f"one end of a Unix socket as fd 0 (process {child.pid}), its other end outside"
        assert outside_socket(lambda: [child.pid], not_these).startswith(said)
        assert outside_socket(lambda: [child.pid, os.getpid()], not_these) == ""
        assert outside_socket(lambda: [child.pid], lambda peer, path: path == b"") == ""
    finally:
        child.kill()
        child.wait()
        other.close()


def test_a_socket_is_left_to_criu_where_its_other_end_may_be_in_flight() -> None:
    one, other = socket.socketpair()
    left, right = socket.socketpair()
    child = subprocess.Popen(["sleep", "1000"], stdin=one, stdout=right)
    outside = os.fstat(other.fileno()).st_ino
    with one, other, left, right:
        try:
            for sent, found in ((b"a word", True), (b"the end", False)):
                socket.send_fds(left, [sent], [] if found else [other.fileno()])
                held = outside_socket(lambda: [child.pid], lambda peer, path: peer != outside)
                assert bool(held) is found
        finally:
            child.kill()
            child.wait()


def test_the_server_of_an_outside_socket_is_named(tmp_path: Path) -> None:
    path = tmp_path / "server"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            child = subprocess.Popen(["sleep", "1000"], stdin=client)
        connection, _ = server.accept()
        try:
            said = f"as fd 0 (process {child.pid}), its other end {path}"
            found = outside_socket(lambda: [child.pid], lambda peer, path: False)
            assert found.endswith(said)
            assert not outside_socket(
                lambda: [child.pid], lambda peer, name: name == os.fsencode(path)
            )
        finally:
            child.kill()
            child.wait()
            connection.close()


CLONE_FILES = 0x400
# A thread, or a child, that has something apart or shares something, and says its id.
APART = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
def apart():
    assert libc.unshare(int(sys.argv[1])) == 0
    if sys.argv[2] == "root":
        os.chroot("/tmp")
    elif sys.argv[2] == "deleted":
        os.chdir(os.path.dirname(sys.argv[3]))
        os.mkdir(sys.argv[3])
        os.chdir(sys.argv[3])
        os.rmdir(sys.argv[3])
    if sys.argv[2] == "two":
        threading.Thread(target=tell).start()
    tell()
def tell():
    os.write(1, b"%d\\n" % threading.get_native_id())  # whole, beside the other thread's
    time.sleep(1000)
if sys.argv[2] == "child":
    child = libc.syscall(56, int(sys.argv[1]) | signal.SIGCHLD, 0, 0, 0, 0)
    if child:
        print(child, flush=True)
    time.sleep(1000)
else:
    threading.Thread(target=apart).start()
"""


@pytest.mark.parametrize(
    ("flags", "kind", "wanted"),
    [
        (CLONE_FILES, "", "a table of descriptors of its own (CLONE_FILES), thread {0},"),
        (CLONE_FS, "", ""),
        (CLONE_FS, "root", "a root folder of its own, thread {0},"),
        (CLONE_FS, "deleted", "a deleted working folder of its own, thread {0},"),
        (CLONE_FS, "two", "a working folder apart (CLONE_FS), threads {0} and {1},"),
        (CLONE_FS, "child", "a working folder (CLONE_FS) that it shares with process {parent}"),
        (CLONE_FILES, "child", ""),
    ],
)
def test_what_threads_do_not_share_and_processes_do_is_named(
    flags: int, kind: str, wanted: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", APART, str(flags), kind, str(tmp_path / "folder")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            ids = sorted(int(process.stdout.readline()) for _ in range(1 + (kind == "two")))
            named = wanted.format(*ids, parent=process.pid)
            owner = ids[0] if kind == "child" else process.pid
            assert undumpable(tree_pids(process.pid)) == (
                f"{named} (process {owner})" if named else ""
            )
        finally:
            for pid in tree_pids(process.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_first_thread_that_has_ended_before_others_is_named() -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit(2), of this thread
    )
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        try:
            wait_for(lambda: thread_state(child.pid, child.pid) == "Z", "the end of the thread")
            wanted = f"a first thread that has ended before others (process {child.pid})"
            assert undumpable([child.pid]) == wanted
            assert start_time(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            wait_for(lambda: not start_time(child.pid), "the end of the process")
            assert undumpable([child.pid]) == ""
        finally:
            child.kill()


# An epoll, and what becomes of the end of a pipe that it watches.
WATCHES = """
import os, select, sys, time
read, write = os.pipe()
epoll = select.epoll()
number = epoll.fileno()
epoll.register(read, select.EPOLLIN)
child = os.fork()
for word in sys.argv[2 if child == 0 else 1].split():
    {"dup": lambda: os.dup(read), "close": lambda: os.close(read), "epoll": epoll.close,
     "other": lambda: os.open("/dev/null", os.O_RDONLY)}[word]()
if child == 0:
    print("there", flush=True)
    time.sleep(1000)
print(read, number, child, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("parent", "child", "named"),
    [
        ("", "", ""),
        ("close", "", "parent"),
        ("close other", "", "parent"),
        ("dup close other", "", ""),
        ("", "close", ""),
        ("epoll", "close", "child"),
        ("epoll close", "", ""),
    ],
)
def test_an_epoll_that_watches_what_its_process_has_closed_is_named(
    parent: str, child: str, named: str
) -> None:
    words = [sys.executable, "-c", WATCHES, parent, child]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            lines = {process.stdout.readline(), process.stdout.readline()}
            watched, epoll, other = map(int, str(*(lines - {"there\n"})).split())
            owner = {"parent": process.pid, "child": other}.get(named)
            wanted = f"an epoll as fd {epoll} (process {owner}), which watches descriptor {watched}"
            found = undumpable([process.pid, other])
            assert found == (f"{wanted}, closed there and open elsewhere" if named else "")
        finally:
            for pid in tree_pids(process.pid):
                os.kill(pid, signal.SIGKILL)
