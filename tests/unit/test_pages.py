"""Dumps through the page server, with the real CRIU. They need root, as CRIU does."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import criu_entries
import pytest
from criu_job import COUNTER, Job

from coordinator.page_server import Pages
from flowgpu import launch
from flowgpu.errors import CriuFailed, CriuUnsupported
from flowgpu.host import criu_view, pages
from flowgpu.host.criu import Criu
from flowgpu.host.criu_view import View
from flowgpu.host.pages import PageServer, PagesUnavailable
from flowgpu.host.prctl import become_subreaper
from flowgpu.host.proctree import resume_tree, task_states, tree_pids
from tests.unit.coordinator_job import Jobs, wait_for

PAGE = 4096
VMA_ANON_PRIVATE = 1 << 9  # of CRIU's mm images
MIB = 1 << 20
StartJob = Callable[..., Job]

# Memory of every kind that a dump treats in its own way, in three processes. Each tells the digests
# of its regions on SIGUSR1.
MEMORY = r"""
import ctypes, hashlib, mmap, os, random, signal, sys, time
dice = random.Random(7)
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

def fill(region):
    at = 0
    while at < len(region):
        end = min(at + 4096 * dice.choice([1, 2, 3, 4, 5, 16, 40, 200]), len(region))
        zero = dice.random() < 0.5
        region[at:end] = bytes(end - at) if zero else dice.randbytes(end - at)
        at = end

def private(size, advice=None):
    region = mmap.mmap(-1, size, flags=ANONYMOUS)
    if advice is not None:
        region.madvise(advice)
    return region

with open(sys.argv[1], "w+b") as file:
    file.write(b"of the file " * 200_000)
    file.flush()
    over = mmap.mmap(file.fileno(), 2 << 20, access=mmap.ACCESS_COPY)
os.unlink(sys.argv[1])
over[4096:400 * 4096] = bytes(399 * 4096)       # zeros that hide the file
memfd = os.memfd_create("shared")
os.ftruncate(memfd, 4 << 20)
zero = os.open("/dev/zero", os.O_RDWR)
regions = {
    "small": private(24 << 20, mmap.MADV_NOHUGEPAGE),
    "huge": private(16 << 20, mmap.MADV_HUGEPAGE),
    "over": over,
    "shared": mmap.mmap(-1, 4 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    "memfd": mmap.mmap(memfd, 4 << 20),
    "device": mmap.mmap(zero, 1 << 20, flags=mmap.MAP_PRIVATE),
    "holes": private(64 << 20, mmap.MADV_NOHUGEPAGE),
    "fixed": private(2 << 20),
}
for name, region in regions.items():
    if name == "holes":
        for at in range(0, len(region), 37 * 4096):
            region[at] = at // 4096 % 2
    elif name != "over":
        fill(region)
fixed = regions["fixed"]
address = ctypes.addressof(ctypes.c_char.from_buffer(fixed))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), len(fixed), 1) == 0  # read-only

name = "root"
if sys.argv[2] == "forks" and os.fork() == 0:
    name = "child"
    regions["small"][:8 << 20] = bytes(8 << 20)     # zeros where the parent has none
    regions["huge"][3 << 20:4 << 20] = dice.randbytes(1 << 20)
    if os.fork() == 0:
        name = "grandchild"
        regions["small"][6 << 20:9 << 20] = dice.randbytes(3 << 20)
        regions["over"][:8192] = bytes(8192)

def report(*_):
    found = [hashlib.sha256(region).hexdigest()[:12] for region in regions.values()]
    os.write(1, f"{name} {' '.join(found)}\n".encode())  # in one piece
signal.signal(signal.SIGUSR1, report)
os.write(1, b"ready\n")
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def start() -> Iterator[StartJob]:
    """Starts jobs and ends them with the test."""
    jobs: list[Job] = []

    def begin(*args: str) -> Job:
        jobs.append(Job(*args))
        return jobs[-1]

    become_subreaper()
    yield begin
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            job.end_tree()
        job.close()


@pytest.fixture
def counter(start: StartJob) -> Job:
    """A job of 200 MiB that counts."""
    job = start(COUNTER, "200")
    job.number()
    return job


@pytest.fixture
def memory(start: StartJob, tmp_path: Path) -> Job:
    """The three processes of MEMORY."""
    job = start(MEMORY, str(tmp_path / "file"), "forks")
    assert [job.line() for _ in range(3)] == ["ready"] * 3
    return job


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tiny", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def dump(criu: Criu, job: Job, images: Path, threads: int = 2) -> pages.PageStats:
    """A dump through a server; the job is left stopped."""
    server = PageServer.start(images, tree_pids(job.pid), threads=threads)
    try:
        server.wait_ready(30)
        criu.start_dump(job.pid, images, pages=server).wait()
        return server.stats()
    finally:
        server.close()


def digests(job: Job) -> list[str]:
    for pid in tree_pids(job.pid):
        os.kill(pid, signal.SIGUSR1)
    lines = [job.line() for _ in tree_pids(job.pid)]
    assert None not in lines
    return sorted(line for line in lines if line is not None)


def restore(criu: Criu, job: Job, images: Path) -> View | None:
    """The job as it was; the view of which CRIU has restored it, if it needed one."""
    os.close(job.read_end)
    os.close(job.write_end)
    job.read_end, job.write_end = os.pipe()
    inherit = {f"pipe:[{job.inode}]": job.write_end}
    folder = images.with_name(f"{images.name}-view")
    view = criu_view.make(images, folder)
    work = images.parent
    pid = criu.restore(images, inherit_fds=inherit, leave_stopped=True, view=view, work_dir=work)
    assert pid == job.pid
    if view is not None:
        view.remove()
    resume_tree(job.pid)
    job.inode = os.fstat(job.write_end).st_ino
    return view


def goes_on(job: Job) -> None:
    job.drain()
    first = job.number()
    assert [job.number() for _ in range(3)] == [first + 1, first + 2, first + 3]
    wait_for(lambda: set(task_states(job.pid).values()) <= {"S", "R"}, "all threads to run")


def leftovers(images: Path) -> list[str]:
    found = [*images.glob("pages-*"), *images.glob("pagemap-*")]
    return sorted(path.name for path in found)


IN_PARENT = 1
Contents = dict[str, dict[int, tuple[int, bytes]]]


def contents(images: Path) -> Contents:
    """Flags and bytes of each page by address, in the order of the image, by pagemap image.

    What a process has in common with its parent is taken from there.
    """
    found: Contents = {}
    for path in images.glob("pagemap-*.img"):
        head, *entries = criu_entries.load(path)
        own = found[path.name] = {}
        with (images / f"pages-{head['pages_id']}.img").open("rb") as file:
            for entry in entries:
                for n in range(entry["nr_pages"]):
                    page = b"" if entry["flags"] == IN_PARENT else file.read(PAGE)
                    own[entry["vaddr"] + n * PAGE] = (entry["flags"], page)
            assert not file.read(1)
    parents = parents_of(images)
    for name, own in found.items():
        for at, (flags, _) in own.items():
            owner = name
            while found[owner][at][0] == IN_PARENT:
                owner = parents[owner]
            own[at] = (flags, found[owner][at][1])
    return found


def parents_of(images: Path) -> dict[str, str]:
    """The pagemap image of the parent of each process, by its own."""
    if not (images / "pstree.img").exists():
        return {}
    tree = criu_entries.load(images / "pstree.img")
    return {f"pagemap-{one['pid']}.img": f"pagemap-{one['ppid']}.img" for one in tree}


def anonymous_pages(images: Path, name: str) -> set[int]:
    """Pages of private anonymous mappings of the process of a pagemap, as CRIU has them."""
    mm = images / name.replace("pagemap-", "mm-")
    if not mm.exists():
        return set()
    found: set[int] = set()
    for vma in criu_entries.load(mm)[0]["vmas"]:
        if vma["status"] & VMA_ANON_PRIVATE:
            found.update(range(vma["start"], vma["end"], PAGE))
    return found


@pytest.mark.parametrize("threads", [1, 4])
def test_images_are_those_of_criu_without_anonymous_zeros(
    criu: Criu, memory: Job, tmp_path: Path, threads: int
) -> None:
    for pid in tree_pids(memory.pid):
        # The C library has the kernel write into each thread's memory on which processor it is.
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    time.sleep(0.1)
    criu.dump(memory.pid, tmp_path / "plain")
    stats = dump(criu, memory, tmp_path / "served", threads)
    plain, served = contents(tmp_path / "plain"), contents(tmp_path / "served")
    assert served.keys() == plain.keys() and len(plain) >= 4
    left_out = left_out_with_parent = 0
    parents = parents_of(tmp_path / "served")
    for name, expected in plain.items():
        own = served[name]
        assert list(own) == [at for at in expected if at in own], name
        # What CRIU marks for pages that come late, which no restore asks for, only CRIU sets.
        wrong = [hex(at) for at, (_, page) in own.items() if page != expected[at][1]]
        assert not wrong, (name, wrong)
        missing = expected.keys() - own.keys()
        assert missing <= anonymous_pages(tmp_path / "served", name), name
        assert all(not any(expected[at][1]) for at in missing), name
        left_out += len(missing) * PAGE
        if (parent := parents.get(name)) in plain:
            of_both = missing & (plain[parent].keys() - served[parent].keys())
            left_out_with_parent += len(of_both) * PAGE
    # Zeros that a child has in common with its parent are not copied, and so do not count.
    assert left_out - left_out_with_parent <= stats.zero_bytes < left_out
    assert stats.zero_bytes > 20 * MIB
    assert stats.bytes - stats.zero_bytes == sum(
        path.stat().st_size for path in (tmp_path / "served").glob("pages-*.img")
    )
    # Nothing worth while is kept: runs of four pages and more are gone.
    for name, own in served.items():
        anonymous = anonymous_pages(tmp_path / "served", name)
        zeros = [at for at, (_, page) in own.items() if at in anonymous and not any(page)]
        assert len(zeros) < 0.2 * len(plain[name]), name
    other = {path.name for path in (tmp_path / "plain").iterdir()} - set(
        leftovers(tmp_path / "plain")
    )
    assert other <= {path.name for path in (tmp_path / "served").iterdir()}


def test_restored_processes_have_every_byte_of_every_kind_of_memory(
    criu: Criu, memory: Job, tmp_path: Path
) -> None:
    before = digests(memory)
    stats = dump(criu, memory, tmp_path / "images")
    assert stats.zero_bytes > 20 * MIB and len(stats.inherited) == 2
    memory.end_tree()
    view = restore(criu, memory, tmp_path / "images")
    assert view is not None and view.inherits
    assert digests(memory) == before
    # Once more: the restored processes are dumped as the first ones were.
    dump(criu, memory, tmp_path / "again")
    memory.end_tree()
    restore(criu, memory, tmp_path / "again")
    assert digests(memory) == before


def test_a_restore_that_fills_the_memory_itself_takes_these_images(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(MEMORY, str(tmp_path / "file"), "alone")
    assert job.line() == "ready"
    before = digests(job)
    assert dump(criu, job, tmp_path / "images").zero_bytes > 10 * MIB
    job.kill()
    view = restore(criu, job, tmp_path / "images")
    assert view is not None and view.bytes > 10 * MIB
    assert digests(job) == before


def test_a_job_that_forks_after_the_start_is_dumped_whole(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    program = "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: os.fork())\n"
    job = start(
        program + "data = os.urandom(8 << 20)\nprint('ready', flush=True)\n"
        "while True:\n    time.sleep(0.01)\n    os.write(1, b'%d\\n' % hash(data))\n"
    )
    job.line()
    value = job.line()
    server = PageServer.start(tmp_path, [job.pid])
    try:
        server.wait_ready(30)
        # Before the job where memory runs out.
        assert Path(f"/proc/{server.pid}/oom_score_adj").read_text() == "1000\n"
        os.kill(job.pid, signal.SIGUSR1)
        while len(tree_pids(job.pid)) < 2:
            time.sleep(0.01)
        criu.start_dump(job.pid, tmp_path, pages=server).wait()
        assert server.stats().files >= 2
    finally:
        server.close()
    job.end_tree()
    restore(criu, job, tmp_path)
    assert {job.line() for _ in range(10)} == {value}
    assert len(tree_pids(job.pid)) == 2


def test_many_pieces_of_shared_memory_are_dumped(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(
        "import mmap, os, time\n"
        "parts = [mmap.mmap(-1, 8192) for _ in range(300)]\n"
        "for n, part in enumerate(parts): part[5000:5008] = n.to_bytes(8, 'little')\n"
        "while True:\n    time.sleep(0.01)\n"
        "    total = sum(int.from_bytes(part[5000:5008], 'little') for part in parts)\n"
        "    os.write(1, b'%d\\n' % total)\n"
    )
    assert job.number() == 300 * 299 // 2
    assert dump(criu, job, tmp_path).files > 300
    job.kill()
    restore(criu, job, tmp_path)
    assert job.number() == 300 * 299 // 2


def test_a_full_disk_fails_the_dump_by_the_name_of_the_file(
    criu: Criu, counter: Job, tiny: Path
) -> None:
    images = tiny / "images"
    with pytest.raises(CriuFailed, match=r"images/pages-1\.img: No space left on device"):
        dump(criu, counter, images)
    goes_on(counter)
    assert leftovers(images) == []


def test_a_killed_server_fails_the_dump_and_the_job_goes_on(
    criu: Criu, counter: Job, tmp_path: Path
) -> None:
    dice = random.Random(3)
    failed = 0
    for attempt in range(12):
        images = tmp_path / str(attempt)
        server = PageServer.start(images, [counter.pid])
        server.wait_ready(30)
        timer = threading.Timer(dice.uniform(0.0, 0.15), os.kill, [server.pid, signal.SIGKILL])
        run = criu.start_dump(counter.pid, images, pages=server)
        timer.start()
        try:
            run.wait()
            resume_tree(counter.pid)
        except CriuFailed as error:
            assert "page server was ended by SIGKILL" in str(error)
            failed += 1
            timer.join()
            server.close()
            assert leftovers(images) == []
        timer.join()
        server.close()
        goes_on(counter)
        shutil.rmtree(images)
    assert failed >= 3


def test_a_cancelled_dump_ends_the_server_and_leaves_no_pages(
    criu: Criu, counter: Job, tmp_path: Path
) -> None:
    for moment in (0.0, 0.02, 0.05):
        images = tmp_path / str(moment)
        server = PageServer.start(images, [counter.pid])
        server.wait_ready(30)
        run = criu.start_dump(counter.pid, images, pages=server)
        time.sleep(moment)
        run.cancel()
        assert server.failure() == ""
        server.close()
        assert leftovers(images) == []
        assert not Path(f"/proc/{server.pid}").exists()
        goes_on(counter)


def test_what_criu_cannot_dump_is_told_as_without_a_server(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        setup = f"import socket\nc = socket.socket(socket.AF_UNIX)\nc.connect({str(path)!r})\n"
        job = start(setup + COUNTER)
        with listener.accept()[0]:
            job.number()
            with pytest.raises(CriuUnsupported, match="Unix socket"):
                dump(criu, job, tmp_path / "images")
            goes_on(job)


def test_without_the_program_a_dump_is_criu_s_own(
    criu: Criu, counter: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "program", lambda name: tmp_path / "missing")
    with pytest.raises(PagesUnavailable, match="missing"):
        PageServer.start(tmp_path / "images", [counter.pid])
    server = Pages()
    server.start(tmp_path / "images", [counter.pid])
    server.ready(1.0)
    assert server.take() is None
    criu.start_dump(counter.pid, tmp_path / "images", pages=server.take()).wait()
    server.finish()
    server.close()
    assert len(leftovers(tmp_path / "images")) >= 2


def test_a_server_that_ends_before_the_dump_is_not_used(
    criu: Criu, counter: Job, tmp_path: Path
) -> None:
    server = Pages()
    server.start(tmp_path, [counter.pid])
    server.ready(30)
    used = server.take()
    assert used is not None
    os.kill(used.pid, signal.SIGKILL)
    while not used.has_ended():
        time.sleep(0.001)
    assert server.take() is None and leftovers(tmp_path) == []
    criu.start_dump(counter.pid, tmp_path, pages=server.take()).wait()
    assert "pages-1.img" in leftovers(tmp_path)


def test_a_server_that_cannot_make_its_files_is_unavailable(counter: Job, tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").touch()
    server = PageServer.start(tmp_path, [counter.pid])
    with pytest.raises(PagesUnavailable, match=r"pages-1\.img: File exists"):
        server.wait_ready(30)


def children(pid: int) -> dict[str, int]:
    """Children of any thread, by the name of their program."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # threads and children come and go
            for child in path.read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                found[Path(command[0]).name] = int(child)
    return found


@contextlib.contextmanager
def killed_server(coordinator: int, moment: str) -> Iterator[None]:
    """The page server of a coordinator is killed once a program of this name runs there."""
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            programs = children(coordinator)
            if moment in programs and "flowgpu-pages" in programs:
                os.kill(programs["flowgpu-pages"], signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_server_killed_before_the_pause_costs_nothing(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3)
    for attempt in range(20):
        image = tmp_path / f"image{attempt}"
        try:
            with killed_server(job.coordinator, "flowgpu-pages"):
                job.dump(image)
            break
        except CriuFailed as error:  # it was killed late, in the pause
            assert "page server was ended by SIGKILL" in str(error)
    assert job.end() == 75
    assert "CRIU writes the pages itself" in job.directory.coordinator_log.read_text()
    jobs.restore(image).wait_steps(10)


def test_a_server_killed_in_the_pause_leaves_the_job_as_it_was(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3)
    for attempt in range(20):
        image = tmp_path / f"image{attempt}"
        try:
            with killed_server(job.coordinator, "ld.so"):
                # It may have had all pages before it was killed.
                job.dump(image, leave_running=True)
        except CriuFailed as error:
            assert "page server was ended by SIGKILL" in str(error)
            break
    else:
        pytest.fail("the server was never killed in time")
    job.wait_steps(10)
    assert job.record.state == "running"
    assert not list(tmp_path.glob(f"{image.name}*"))
    job.dump(tmp_path / "image")
    assert job.end() == 75
    assert "pages: PageStats(" in job.directory.coordinator_log.read_text()


class Client:
    """Speaks to a server as CRIU would."""

    def __init__(self, folder: Path) -> None:
        self.server = PageServer.start(folder, [])
        self.socket = socket.socket(fileno=os.dup(self.server.socket))
        self.server.hand_over()
        self.server.wait_ready(30)

    def say(self, command: int, count: int = 0, address: int = 0, target: int = 0) -> None:
        self.socket.sendall(struct.pack("<IIQQQ", command, 0, count, address, target))

    def end(self) -> str:
        """What the server says of itself when the connection ends."""
        self.socket.close()
        failure = self.server.failure()
        self.server.close()
        return failure


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A connection to a server that writes to tmp_path."""
    client = Client(tmp_path)
    yield client
    client.end()


TARGET = 123456 << 8 | 2
OPEN, ADD, CLOSE = 4, 6 | 4 << 16, 0x1023


def test_pages_in_small_pieces_arrive_in_order(client: Client, tmp_path: Path) -> None:
    dice = random.Random(5)
    data = dice.randbytes(300 * PAGE) + bytes(100 * PAGE) + dice.randbytes(50 * PAGE)
    client.say(OPEN, target=TARGET)
    assert client.socket.recv(1) == b"\0"
    client.say(ADD, len(data) // PAGE, 0, TARGET)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 20)
    at = 0
    while at < len(data):
        size = dice.choice([7, 100, 500, 1000] if at < 200 * PAGE else [5000, 50_000])
        client.socket.sendall(data[at : at + size])
        at += size
    client.say(CLOSE)
    assert client.socket.recv(4) == b"\0" * 4
    stats = client.server.stats()
    # More pieces than a pipe takes; shared memory keeps its zeros.
    assert stats.copied_twice > 0 and stats.zero_bytes == 0
    client.server.close()
    pages_of = contents(tmp_path)["pagemap-shmem-123456.img"]
    assert b"".join(page for _, page in pages_of.values()) == data


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([(77, 0, 0, 0)], "command 77"),
        ([(OPEN, 0, 0, 3)], "target 3"),
        ([(ADD, 1, 0, TARGET)], "not open"),
        ([(OPEN, 0, 0, TARGET), (ADD, 1, 5, TARGET)], "not in its message"),
        ([(OPEN, 0, 0, TARGET), (6, 1, 0, TARGET)], "not in its message"),
        ([(OPEN, 0, 0, TARGET), (ADD, 1 << 50, 0, TARGET)], "not in its message"),
        ([(OPEN, 0, 0, TARGET), (OPEN, 0, 0, TARGET)], "second set"),
    ],
)
def test_a_bad_message_ends_the_server_by_name(
    client: Client, tmp_path: Path, messages: list[tuple[int, int, int, int]], reason: str
) -> None:
    for message in messages:
        client.say(*message)
    # The server ends by itself, which ends the connection.
    while client.socket.recv(1):
        pass
    assert reason in client.end()
    assert leftovers(tmp_path) == []


def test_a_connection_that_ends_early_leaves_nothing(client: Client, tmp_path: Path) -> None:
    client.say(OPEN, target=TARGET)
    client.say(ADD, 8, 0, TARGET)
    client.socket.sendall(bytes(3 * PAGE))
    assert client.end() == ""  # it is CRIU that has to say why
    assert leftovers(tmp_path) == []
