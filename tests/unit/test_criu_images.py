"""What CRIU's images and its log say, and what a dump or restore names that cannot be done.

They need root (or CAP_SYS_ADMIN and CAP_SYS_PTRACE).
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import criu_entries
import pytest
from criu_job import StartJob, reap_orphans, restore, taken

from flowgpu.errors import (
    CriuFailed,
    CriuUnsupported,
    FileChanged,
    FileMissing,
    ImageDamaged,
    PidTaken,
)
from flowgpu.host import criu as criu_module
from flowgpu.host import criu_images, criu_sockets, tcp
from flowgpu.host.criu import Criu
from flowgpu.host.criu_images import OpenedFile
from flowgpu.host.probes import libc
from flowgpu.host.proctree import external_pipes, ids_in_use, resume_tree, task_states
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for


def needs_device(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"this machine has no {path}")


def test_sockets_by_a_path_are_told_from_those_outside(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    outside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    outside.bind(str(tmp_path / "daemon"))
    binds = (
        "import socket\n"
        f"named = socket.socket(socket.AF_UNIX); named.bind({str(folder / 'listener')!r})\n"
        "named.listen(1)\n"
        "pair = socket.socketpair()\n"
        "client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"client.connect({str(tmp_path / 'daemon')!r})\n"
    )
    job = start(setup=binds)
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    outside.close()
    paths = {folder / "listener"}, {tmp_path / "daemon"}
    assert criu_sockets.socket_paths(tmp_path / "images") == paths


SENT = """
import socket
left, right = socket.socketpair()
ends = socket.socketpair(socket.AF_UNIX, socket.{})
socket.send_fds(left, [b"one"], [ends[1].fileno()])
{}
"""


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_socket_in_flight_is_lost_where_nobody_has_an_end_of_it(
    criu: Criu, start: StartJob, tmp_path: Path, kind: str, closed: int
) -> None:
    closing = "\n".join(f"ends[{end}].close()" for end in (1, 0)[:closed])
    job = start(setup=SENT.format(kind, closing))
    job.number()
    criu.dump(job.pid, tmp_path)
    before = job.last()
    job.kill()
    if closed < 2:
        assert not criu_sockets.lost_sockets(tmp_path)
        restore(criu, job, tmp_path)
        assert job.number() == before + 1
    else:
        assert len(criu_sockets.lost_sockets(tmp_path)) == 1
        with pytest.raises(CriuFailed):
            restore(criu, job, tmp_path)


def test_image_files_are_read_as_pycriu_reads_them(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    zombie = (
        "import os\nif (child := os.fork()) == 0: os._exit(0)\n"
        "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
    )
    job = start(setup="import socket; pair = socket.socketpair()\n" + zombie)
    job.number()
    criu.dump(job.pid, tmp_path)
    pids = [e["pid"] for e in criu_entries.load(tmp_path / "pstree.img")]
    assert criu_images.pids(tmp_path) == pids
    assert len(pids) == 2
    assert criu_images.living_pids(tmp_path) == [job.pid]
    found_files = [m.reg for m in criu_entries.messages(tmp_path / "files.img", "file_entry")]
    regular = [reg for reg in found_files if stat.S_ISREG(reg.mode)]
    assert criu_images.regular_files(tmp_path) == [
        OpenedFile(reg.id, reg.name, reg.flags, reg.size if reg.HasField("size") else None)
        for reg in regular
    ]
    found, stats = criu_images.dump_stats(tmp_path), criu_entries.load(tmp_path / "stats-dump")[0]
    assert found.pages_written == stats["dump"]["pages_written"] > 0
    assert found.pages_scanned == stats["dump"]["pages_scanned"]
    assert found.memory_dump_s == stats["dump"]["memdump_time"] / 1e6
    assert found.memory_write_s == stats["dump"]["memwrite_time"] / 1e6
    assert found.frozen_s == stats["dump"]["frozen_time"] / 1e6
    assert found.freezing_s == stats["dump"]["freezing_time"] / 1e6


# A signal stack, whose bytes are the argument, in a thread beside the first.
SIGNAL_STACK = """
import ctypes, threading, time
has_stack = threading.Event()
def with_stack():
    memory = ctypes.create_string_buffer(65536)
    stack = (ctypes.c_uint64 * 3)(ctypes.addressof(memory), 0, len(memory))
    assert ctypes.CDLL(None).sigaltstack(stack, None) == 0
    has_stack.set()
    while True:
        time.sleep(1)
threading.Thread(target=with_stack, daemon=True).start()
has_stack.wait()
"""


def test_threads_in_the_image(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    """Their signal stacks, and registers that CRIU has no place for, as in the middle of AMX."""
    job = start(setup=SIGNAL_STACK)
    job.number()
    criu.dump(job.pid, tmp_path)
    assert criu_images.smallest_signal_stack(tmp_path) == 65536
    assert criu_images.unsaved_registers(tmp_path) is None
    thread = criu_images.thread_ids(tmp_path)[2]
    path = tmp_path / f"core-{thread}.img"
    (core,) = criu_entries.messages(path, "core_entry")
    registers = core.thread_info.fpregs.xsave

    def write() -> None:
        data = core.SerializeToString()
        path.write_bytes(path.read_bytes()[:8] + len(data).to_bytes(4, "little") + data)

    registers.xstate_bv |= 1 << 18 | 1 << 40
    write()
    found = criu_images.unsaved_registers(tmp_path)
    assert found == (thread, "AMX tiles, state component 40")
    for rights, known in ((0x55555554, []), (0, []), (0x55555550, [job.pid])):
        registers.pkru[:] = [rights]
        write()
        assert criu_images.with_protection_keys(tmp_path) == known


def test_a_process_with_protection_keys_is_known(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    if (key := libc().pkey_alloc(0, 0)) < 0:
        pytest.skip("this machine has no keys")
    libc().pkey_free(key)
    for number, setup in enumerate(("", "import ctypes; ctypes.CDLL(None).pkey_alloc(0, 0)\n")):
        job, images = start(setup=setup), tmp_path / f"{number}"
        job.number()
        criu.dump(job.pid, images)
        assert criu_images.with_protection_keys(images) == ([job.pid] if setup else [])


@pytest.mark.parametrize(
    "data", [b"\x02\0\0\0\x08", b"\x02\0\0\0\x08\x81", b"\x02\0\0\0\x0f\0", b"\1", b""]
)
def test_a_damaged_image_file_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pstree.img").write_bytes(bytes(8) + data)
    with pytest.raises(ImageDamaged, match=r"pstree\.img"):
        criu_images.pids(tmp_path)
    (tmp_path / "pstree.img").unlink()
    with pytest.raises(ImageDamaged, match="No such file"):
        criu_images.pids(tmp_path)


def test_restore_names_a_taken_pid(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    resume_tree(job.pid)
    with pytest.raises(PidTaken, match=f"Process id {job.pid}"):
        criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    job.drain()
    assert job.number() >= 0


def test_restore_names_the_taken_id_of_a_thread(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    ids = sorted(task_states(job.pid))
    assert criu_images.thread_ids(tmp_path) == ids and len(ids) == 4
    job.kill()
    with taken(ids[2]), pytest.raises(PidTaken, match=f"Process id {ids[2]}, "):
        criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    assert not (tmp_path / "restore.log").exists()
    # Meanwhile it is found by CRIU itself.
    with taken(ids[2]), pytest.MonkeyPatch.context() as patched:
        patched.setattr(criu_module, "ids_in_use", lambda _: [])
        with pytest.raises(PidTaken, match=f"of a thread of process {job.pid}"):
            criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    with taken(ids[2], seconds=0.2), pytest.MonkeyPatch.context() as patched:
        patched.setattr(criu_module, "_IDS_SECONDS", SECONDS)
        restore(criu, job, tmp_path)
    assert sorted(task_states(job.pid)) == ids


def test_an_id_is_in_use_while_it_is_that_of_a_session() -> None:
    words = "trap '' HUP; sleep 1000 & echo $!; exit 0"
    leader = subprocess.Popen(
        ["bash", "-c", words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout
    with leader.stdout as out:
        member = int(out.readline())
    try:
        leader.wait()
        assert not Path(f"/proc/{leader.pid}").exists()
        assert ids_in_use([leader.pid, os.getpid(), member]) == [leader.pid, os.getpid(), member]
    finally:
        os.kill(member, signal.SIGKILL)

    def is_free() -> bool:
        reap_orphans()
        return not ids_in_use([leader.pid, member])

    wait_for(is_free, "both ids to be free")


def test_restore_names_a_file_that_grew(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    job = start(setup=f"log = open({str(log)!r}, 'w'); log.write('abc'); log.flush()\n")
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    assert (str(log), 3) in [
        (file.path, file.size) for file in criu_images.regular_files(tmp_path / "images")
    ]
    job.kill()
    log.write_text("abcdef")
    with pytest.raises(FileChanged, match=r"log\.txt has 6 bytes now and had 3"):
        restore(criu, job, tmp_path / "images")
    log.unlink()
    with pytest.raises(FileMissing, match=r"log\.txt"):
        restore(criu, job, tmp_path / "images")
    log.write_text("abc")
    restore(criu, job, tmp_path / "images")
    job.number()


def test_deleted_file_and_lock_come_back(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    setup = f"""
import fcntl, os
kept = open({str(tmp_path / "deleted")!r}, "w+b")
kept.write(bytes(range(256)) * (20 << 12))  # 20 MiB, past what CRIU takes by default
kept.flush()
os.unlink(kept.name)
lock = open({str(tmp_path / "lock")!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
    job = start(setup=setup)
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    job.kill()
    restore(criu, job, tmp_path / "images")
    job.number()
    assert Path(f"/proc/{job.pid}/fd/3").read_bytes() == bytes(range(256)) * (20 << 12)
    with (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_dump_names_an_outside_unix_socket(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        job = start(
            setup=f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})\n"
        )
        with server.accept()[0]:
            job.number()
            with pytest.raises(CriuUnsupported, match="Unix socket"):
                criu.dump(job.pid, tmp_path / "images")
            job.drain()
            assert job.number() > 0


# Prints 1 when its connection to itself works, and 2 more while it has the one outside.
CONNECTED = """
import socket, sys, time
outside = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
other, _ = server.accept()
def is_connected():
    try:
        return bool(outside.getpeername())
    except OSError:
        return False
while True:
    inside.send(b"x")
    print((other.recv(1) == b"x") + 2 * is_connected(), flush=True)
    time.sleep(0.01)
"""


def test_a_connection_is_closed_in_an_image_and_the_others_are_kept(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = start(CONNECTED, str(server.getsockname()[1]))
        with server.accept()[0]:
            assert job.number() == 3
            criu.dump(job.pid, tmp_path / "images")
            found = tcp.look([job.pid])
            (outside,) = found.outside
            assert len(found.pairs) == 2 and outside.pid == job.pid
            assert not tcp.lost(tmp_path / "images", found.pairs)
            criu_sockets.close_connections(tmp_path / "images", {outside.row.inode})
            job.last()
            job.kill()
            assert tcp.hindered(tmp_path / "images", 0) == ""
            restore(criu, job, tmp_path / "images")
            job.number()  # It may have been dumped between its look and this line.
            assert job.number() == 1


LISTENING = """
import socket, time
sockets = [
    socket.create_server(("127.0.0.1", 0)),
    socket.create_server(("127.0.0.1", 0), reuse_port=True),
    socket.create_server(("::1", 0), family=socket.AF_INET6),
    socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True),
    socket.socket(),
]
while True:
    print(*(one.getsockname()[1] for one in sockets[:4]), flush=True)
    time.sleep(0.01)
"""


def test_where_sockets_listen_is_read_from_an_image(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(LISTENING)
    line = job.line()
    assert line is not None
    ports = [int(word) for word in line.split()]
    criu.dump(job.pid, tmp_path / "images")
    assert criu_sockets.listeners(tmp_path / "images") == [
        criu_sockets.Listener("127.0.0.1", ports[0]),
        criu_sockets.Listener("127.0.0.1", ports[1], shared=True),
        criu_sockets.Listener("::1", ports[2], only_6=True),
        criu_sockets.Listener("::", ports[3]),
    ]


def test_dump_names_a_device_it_cannot_save(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    needs_device("/dev/loop-control")
    job = start(setup="device = open('/dev/loop-control', 'rb')\n")
    job.number()
    with pytest.raises(CriuUnsupported, match="/dev/loop-control open as fd 3"):
        criu.dump(job.pid, tmp_path)
    job.drain()
    assert job.number() > 0


def test_dump_names_an_io_uring(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    setup = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(425, 4, ctypes.create_string_buffer(256)) < 0:  # io_uring_setup
    print("none", flush=True)
    sys.exit()
"""
    job = start(setup=setup)
    if job.line() == "none":
        pytest.skip("this kernel has io_uring switched off")
    with pytest.raises(CriuUnsupported, match="an io_uring as fd 3"):
        criu.dump(job.pid, tmp_path)


def test_dump_names_a_device_mapping(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    needs_device("/dev/loop0")
    setup = """
import mmap, os
device = os.open("/dev/loop0", os.O_RDONLY)
held = mmap.mmap(device, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
os.close(device)
"""
    job = start(setup=setup)
    job.number()
    with pytest.raises(CriuUnsupported, match="a mapping of /dev/loop0"):
        criu.dump(job.pid, tmp_path)


def test_dump_of_a_gone_process_fails_by_name(criu: Criu, tmp_path: Path) -> None:
    with pytest.raises(CriuFailed, match="CRIU could not dump"):
        criu.dump(2**22 - 7, tmp_path)


def test_external_pipes_lists_outside_pipes_with_their_direction(start: StartJob) -> None:
    job = start(
        "import os, time\ninner = os.pipe()\nprint(0, flush=True)\ntime.sleep(60)\n",
    )
    job.number()
    (pipe,) = external_pipes(job.pid)
    assert (pipe.inode, pipe.direction) == (job.inode, "write")
    assert pipe.holders == ((job.pid, 1), (job.pid, 2))
    assert pipe.key == f"pipe:[{job.inode}]"


def test_stdin_from_an_outside_pipe_is_connected_again(criu: Criu, tmp_path: Path) -> None:
    code = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdin and process.stdout
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ONE\n"
        pipes = external_pipes(process.pid)
        assert {pipe.direction for pipe in pipes} == {"read", "write"}
        criu.dump(process.pid, tmp_path)
        process.kill()
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    ends = {"read": in_read, "write": out_write}
    pid = criu.restore(tmp_path, inherit_fds={p.key: ends[p.direction] for p in pipes})
    os.close(in_read)
    os.close(out_write)
    os.write(in_write, b"two\n")
    assert os.read(out_read, 100) == b"TWO\n"
    os.close(in_write)
    assert os.waitpid(pid, 0) == (pid, 0)
    os.close(out_read)
