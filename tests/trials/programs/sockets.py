"""Sockets, event loops and watches, as servers and clients of metrics have them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

from cuda.bindings import driver as cu

from tests.trials.prelude import LEFT, TOLD, Gpu, Here, child, ended, libc, ok, program, say, until

LOCAL = "127.0.0.1"
ANY_ADDRESS = ""


def listener(port: int, backlog: int = 5) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((LOCAL, port))
    made.listen(backlog)
    return made


def datagrams(port: int | None = None) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(5)
    if port is not None:
        made.bind((LOCAL, port))
    return made


def answer(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except OSError as failed:
        return failed.strerror or type(failed).__name__


@program("TCP servers: options, two that share a port, IPv4 on IPv6, one that is only bound")
def tcp_servers(here: Here) -> None:
    gpu, port = Gpu(), here.port
    server = listener(port, 50)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pair = []
    for _ in range(2):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((LOCAL, port + 1))
        one.listen(100)
        one.settimeout(5)
        pair.append(one)
    both = socket.socket(socket.AF_INET6)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    both.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    both.bind(("::", port + 2))
    both.listen(5)
    bound = socket.socket()
    bound.bind((LOCAL, port + 3))

    def options() -> list[int]:
        asked = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.SOL_SOCKET, socket.SO_RCVBUF)]
        asked += [(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_NODELAY)]
        return [server.getsockopt(*one) for one in asked]

    before = options()
    say("step", gpu.step())
    here.ready()
    say("options", options() == before)
    client = socket.create_connection((LOCAL, port))
    accepted, _ = server.accept()
    client.send(b"x")
    say("accepts", accepted.recv(1), accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
    for _ in range(30):
        socket.create_connection((LOCAL, port + 1)).close()
    say("both", [bool(one.accept()) for one in pair])
    socket.create_connection((LOCAL, port + 2)).close()
    bound.listen(1)
    say("IPv6", bool(both.accept()), bound.getsockname()[1] == port + 3, gpu.step())


@program("a TCP server that accepts once there is data (`TCP_DEFER_ACCEPT`)")
def deferred_accept(here: Here) -> None:
    gpu, server = Gpu(), listener(here.port)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
    before = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
    say("step", gpu.step())
    here.ready()
    after = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
    say("the same" if before == after else (before, after), gpu.step())


@program("a TCP connection to itself, with data in both directions and a port of the kernel's")
def tcp_connection(here: Here) -> None:
    gpu, server = Gpu(), listener(here.port)
    client = socket.create_connection((LOCAL, here.port))
    accepted, _ = server.accept()
    client.send(b"before")
    accepted.send(b"back")
    say("step", gpu.step())
    here.ready()
    client.send(b" after")
    said = b""
    while len(said) < 12:
        said += accepted.recv(99)
    say(said, client.recv(99), gpu.step())


@program("TCP connections of which one end is closed, for writing or whole, with data left to read")
def tcp_ends(here: Here) -> None:
    gpu, server = Gpu(), listener(here.port)
    half, (other, _) = socket.create_connection((LOCAL, here.port)), server.accept()
    half.send(b"question")
    half.shutdown(socket.SHUT_WR)
    whole, (last, _) = socket.create_connection((LOCAL, here.port)), server.accept()
    whole.send(b"last words")
    whole.close()
    say("step", gpu.step())
    here.ready()
    say(other.recv(99), other.recv(99), other.send(b"answer"), half.recv(99), half.close())
    say(last.recv(99), last.recv(99), gpu.step())


@program("a TCP connection whose receiver is slow: megabytes wait to be sent")
def tcp_full(here: Here) -> None:
    gpu, server = Gpu(), listener(here.port)
    client, (accepted, _) = socket.create_connection((LOCAL, here.port)), server.accept()
    block, sent, got = bytes(range(251)) * 1000, 0, bytearray()
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += client.send(block[sent % len(block) :])
    say("step", gpu.step())
    here.ready()
    while len(got) < sent:
        got += accepted.recv(1 << 20)
    whole = block * (sent // len(block) + 1)
    say(sent > 1 << 20, got == whole[:sent], gpu.step())


def counter(here: Here) -> None:
    """A server of a process of its own, as a key-value store is: it uses no GPU."""
    with listener(here.port) as server:
        connections = [server.accept()[0] for _ in range(4)]
        for count in itertools.count(1):
            connection = connections[count % 4]
            if not connection.recv(4):
                break
            connection.send(struct.pack("<I", count))


@program("a key-value store in a process of its own, asked all the time over four connections")
def tcp_store(here: Here) -> None:
    gpu, stop, wrong, asked = Gpu(), threading.Event(), [], 0
    store = subprocess.Popen(here.other(counter))
    clients: list[socket.socket] = []
    while len(clients) < 4:
        with contextlib.suppress(ConnectionRefusedError):
            clients.append(socket.create_connection((LOCAL, here.port)))

    def ask() -> None:
        nonlocal asked
        while not stop.is_set():
            asked += 1
            clients[asked % 4].send(b"next")
            if struct.unpack("<I", clients[asked % 4].recv(4)) != (asked,):
                wrong.append(asked)

    thread = threading.Thread(target=ask)
    thread.start()
    say("step", gpu.step())
    here.ready()
    before = asked
    say(until(lambda: asked > before + 8))
    stop.set()
    thread.join()
    for client in clients:
        client.close()
    say(wrong, store.wait(), gpu.step())


@program(
    "a client that a TCP server has not accepted yet",
    TOLD,
    why="the connection cannot be kept, and the report of the dump says so",
)
def waiting_client(here: Here) -> None:
    gpu, server = Gpu(), listener(here.port)
    made = os.pipe()

    def client() -> None:
        with socket.create_connection((LOCAL, here.port)) as connection:
            connection.send(b"hello")
            os.write(made[1], b"x")
            connection.close()

    # Its end has gone by the dump, so the server's backlog alone has the connection.
    pid = child(client)
    os.read(made[0], 1)
    codes = ended([pid])
    say("step", codes, gpu.step())
    here.ready()
    server.settimeout(5)
    say(answer(lambda: server.accept()[0].recv(9)), gpu.step())


@program("UDP: a connected client of metrics, and its server")
def metrics(here: Here) -> None:
    gpu, server, client = Gpu(), datagrams(here.port), datagrams()
    client.connect((LOCAL, here.port))
    client.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)
    say("step", gpu.step())
    here.ready()
    client.send(b"metric")
    tos = client.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    say(server.recv(99), client.getpeername()[1] == here.port, tos, gpu.step())


@program(
    "UDP that nobody has read yet",
    TOLD,
    why="CRIU does not keep it, and the report of the dump says so",
)
def unread_datagram(here: Here) -> None:
    gpu, server = Gpu(), datagrams(here.port)
    datagrams().sendto(b"unread", (LOCAL, here.port))
    say("step", gpu.step())
    here.ready()
    say(answer(lambda: server.recv(99)), gpu.step())


@program("membership of a multicast group")
def multicast(here: Here) -> None:
    gpu, server = Gpu(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    group = "239.1.2.3"
    server.bind((ANY_ADDRESS, here.port))
    member = socket.inet_aton(group) + socket.inet_aton(LOCAL)
    server.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    server.settimeout(5)

    def echo() -> object:
        client = datagrams()
        client.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOCAL))
        client.sendto(b"to all", (group, here.port))
        return server.recv(99)

    say(answer(echo), gpu.step())
    here.ready()
    say(answer(echo), gpu.step())


@program("resolver's and netlink sockets: one waits for an answer that never came")
def resolver(here: Here) -> None:
    gpu, asks, links = Gpu(), datagrams(), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    links.bind((0, 0))
    asks.connect((LOCAL, here.port))
    asks.settimeout(0.2)
    say("step", gpu.step())
    here.ready()
    asks.send(b"query")
    say(answer(lambda: asks.recv(99)))
    links.send(struct.pack("IHHIIBxHiII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))
    say(len(links.recv(65536)) > 100, gpu.step())


@program("Unix sockets by abstract names; packets and descriptors in flight; an agent's socket")
def unix_sockets(here: Here) -> None:
    gpu = Gpu()
    abstract, agent = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{here.unique}")
    abstract.listen(3)
    os.chdir(here.folder)  # a path of a socket is short
    agent.bind("agent.sock")
    agent.listen(3)
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first.send(b"one")
    first.send(b"two")
    left, right = socket.socketpair()
    kept, sent = socket.socketpair()
    socket.send_fds(left, [b"descriptors"], [os.open("/dev/zero", os.O_RDONLY), sent.fileno()])
    sent.close()
    say("step", gpu.step())
    here.ready()
    socket.socket(socket.AF_UNIX).connect(f"\0{here.unique}")
    client = socket.socket(socket.AF_UNIX)
    client.connect("agent.sock")
    client.send(b"sign")
    say(bool(abstract.accept()), agent.accept()[0].recv(9), second.recv(9), second.recv(9))
    said, (zero, arrived), *_ = socket.recv_fds(right, 99, 5)
    kept.send(b"it arrived")
    there = socket.socket(fileno=arrived).recv(99)
    say(said, os.readlink(f"/proc/self/fd/{zero}"), there, gpu.step())


@program("a datagram socket connected to a server outside the job (`/dev/log`, journald)")
def system_log(here: Here) -> None:
    gpu, client = Gpu(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.connect(str(here.log))
    say("step", gpu.step())
    here.ready()
    say(client.send(b"<7>trial: after\n"), gpu.step())


@program("asyncio: servers, child watchers, pidfds, signal handlers, pipes, threads")
def asyncio_program(here: Here) -> None:
    asyncio.run(event_loop(here))


async def event_loop(here: Here) -> None:
    gpu, loop, got = Gpu(), asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, got.set)
    os.chdir(here.folder)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        await writer.drain()
        writer.close()

    await asyncio.start_server(serve, LOCAL, here.port)
    await asyncio.start_unix_server(serve, "sock")
    cat = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    script = f"while [ ! -e {here.go} ]; do sleep 0.02; done; exit 7"
    slow = await asyncio.create_subprocess_exec("sh", "-c", script)
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    watched = os.pidfd_open(cat.pid)
    assert cat.stdin and cat.stdout
    cat.stdin.write(b"one\n")
    say(await cat.stdout.readline(), gpu.step())
    say("ready")
    while not here.go.exists():
        await asyncio.sleep(0.005)
    say("slow", await asyncio.wait_for(slow.wait(), 20))
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(got.wait(), 10)
    for opening in (
        asyncio.open_connection(LOCAL, here.port),
        asyncio.open_unix_connection("sock"),
    ):
        reader, writer = await opening
        writer.write(b"you\n")
        say(await reader.readline())
        writer.close()
    cat.stdin.write(b"two\n")
    say(await cat.stdout.readline())
    signal.pidfd_send_signal(watched, signal.SIGTERM)
    say("cat", await cat.wait(), gpu.step())


@program("a server on epoll with timers, an eventfd, a signalfd and a timerfd")
def epoll_server(here: Here) -> None:
    gpu, chooser, server = Gpu(), selectors.EpollSelector(), listener(here.port)
    blocked = {signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    mask = struct.pack("Q", 1 << (signal.SIGUSR2 - 1))
    signalfd = libc.signalfd(-1, mask, os.O_NONBLOCK)
    timerfd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
    libc.timerfd_settime(timerfd, 0, struct.pack("qqqq", 0, 30_000_000, 0, 30_000_000), None)
    event = os.eventfd(0, os.EFD_NONBLOCK)
    names = {"server": server, "signal": signalfd, "timer": timerfd, "event": event}
    for name, one in names.items():
        chooser.register(one, selectors.EVENT_READ, name)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.eventfd_write(event, 3)
    say("step", gpu.step())
    here.ready()
    client = socket.create_connection((LOCAL, here.port))
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(key.data for key, _ in chooser.select(0.05))
        return len(seen) == len(names)

    say(until(all_seen), sorted(seen), os.eventfd_read(event), len(os.read(signalfd, 128)))
    client.close()
    say("step", gpu.step())


# inotify

ALL_EVENTS = 0xFFF


class Watch:
    """Watches as watchdog and `--reload` of servers have them."""

    def __init__(self, *paths: Path) -> None:
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.names = {}
        for path in paths:
            self.names[libc.inotify_add_watch(self._fd, bytes(path), ALL_EVENTS)] = path.name
        assert min(self.names) > 0

    def events(self) -> set[tuple[str, int, str]]:
        found = set()
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 65536)
            while data:
                number, mask, _, size = struct.unpack_from("iIII", data)
                name = data[16 : 16 + size].rstrip(b"\0").decode()
                found.add((self.names[number], mask, name))
                data = data[16 + size :]
        return found


@program("inotify: watches of a tree")
def watched_tree(here: Here) -> None:
    gpu, deep = Gpu(), here.folder / "a" / "b"
    deep.mkdir(parents=True)
    watch = Watch(deep.parent, deep)
    say("step", gpu.step())
    here.ready()
    (deep / f"new-{time.time()}").touch()
    masks: set[int] = set()

    def came() -> bool:
        masks.update(mask for _, mask, _ in watch.events())
        return {0x100, 0x20, 0x8} <= masks

    say("tree", until(came), gpu.step())


@program(
    "inotify: a watch of a folder in memory",
)
def watched_folder_in_memory(here: Here) -> None:
    gpu, folder = Gpu(), Path("/dev/shm") / here.unique
    folder.mkdir()
    watch = Watch(folder)
    say("step", gpu.step())
    here.ready()
    (folder / "new").touch()
    say(until(watch.events), gpu.step())
    shutil.rmtree(folder)


@program(
    "inotify: a watch of a file that is deleted while somebody has it open",
    TOLD,
    why="CRIU makes no watch of such a file, and the report of the dump says so",
    pending={LEFT: "a job that is left running sees that CRIU has opened a watched file"},
)
def watched_deleted_file(here: Here) -> None:
    gpu, path = Gpu(), here.folder / "gone"
    path.touch()
    kept = os.open(path, os.O_RDWR)
    watch = Watch(path)
    path.unlink()
    watch.events()
    say("step", gpu.step())
    here.ready()
    os.write(kept, b"x")
    say(sorted(watch.events()), gpu.step())


# Servers


def engine(here: Here, requests: str, answers: str, state: str) -> None:
    """The engine of a server: takes requests from a pipe and keeps its state in shared memory."""
    gpu, shared = Gpu(), shared_memory.SharedMemory(state)
    libc.prctl(15, b"engine", 0, 0, 0)
    with open(requests, "rb", 0) as reading, open(answers, "wb", 0) as writing:
        for line in reading:
            number = struct.unpack_from("q", shared.buf, 0)[0] + 1
            struct.pack_into("q", shared.buf, 0, number)
            reply = {"request": json.loads(line), "number": number, "step": gpu.step()}
            writing.write(json.dumps(reply).encode() + b"\n")
    shared.close()


@program(
    "a server like vLLM's: an asyncio front, a spawned GPU engine, named shared memory",
)
def inference_server(here: Here) -> None:
    from multiprocessing import get_context

    shared = shared_memory.SharedMemory(here.unique, create=True, size=1 << 20)
    requests, answers = here.folder / "requests", here.folder / "answers"
    for path in (requests, answers):
        os.mkfifo(path)
    words = (here, str(requests), str(answers), here.unique)
    process = get_context("spawn").Process(target=engine, args=words)
    process.start()
    asyncio.run(front(here, requests, answers))
    process.join(30)
    say("engine", process.exitcode, struct.unpack_from("q", shared.buf, 0)[0])
    shared.close()
    shared.unlink()


async def front(here: Here, requests: Path, answers: Path) -> None:
    with requests.open("wb", 0) as writing, answers.open("rb", 0) as reading:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writing.write(await reader.readline())
            writer.write(await asyncio.to_thread(reading.readline))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, LOCAL, here.port)

        async def ask(prompt: str) -> object:
            reader, writer = await asyncio.open_connection(LOCAL, here.port)
            writer.write(json.dumps(prompt).encode() + b"\n")
            reply = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return json.loads(reply)

        say(await ask("first"))
        # What the connection has left behind in the kernel is no part of a job.
        say("ready")
        while not here.go.exists():
            await asyncio.sleep(0.005)
        say(await ask("second"))
        say(await ask("third"))
        server.close()


def monitor() -> Callable[[], list[int]]:
    """What the GPU's monitoring library answers to each call; nothing where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return list
    device, room = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    names = ("MemoryInfo", "UtilizationRates", "PowerUsage", "Name", "UUID", "ComputeMode")
    calls = [getattr(nvml, f"nvmlDeviceGet{name}") for name in names]
    return lambda: [call(device, room, 96) for call in calls]


@program("a thread that asks NVML, the driver and /proc for numbers all the time, as monitors do")
def poller(here: Here) -> None:
    gpu, stop, counts, bad, ask = Gpu(), threading.Event(), [0], [], monitor()
    first = ask()

    def poll() -> None:
        gpu.current()
        while not stop.is_set():
            free, total = ok(cu.cuMemGetInfo())
            answers = ask()
            if answers != first or not 0 < free <= total:
                bad.append(answers)
            Path("/proc/self/statm").read_text()
            counts[0] += 1

    thread = threading.Thread(target=poll)
    thread.start()
    until(lambda: counts[0] > 5)
    say("step", gpu.step())
    here.ready()
    before = counts[0]
    say("goes on", until(lambda: counts[0] > before + 5))
    stop.set()
    thread.join()
    say("bad", bad[:3], gpu.step())


@program("loader threads, a queue and a poll of many pipes, as data loaders have them")
def loader(here: Here) -> None:
    gpu, poll = Gpu(), select.poll()
    pipes = [os.pipe() for _ in range(8)]

    def produce(number: int) -> Callable[[], None]:
        def run() -> None:
            for batch in range(2):
                if batch:
                    here.wait()
                os.write(pipes[number][1], bytes([number]) * 1000)

        return run

    pids = [child(produce(number)) for number in range(8)]

    def batch() -> list[int]:
        for reader, _ in pipes:
            poll.register(reader, select.POLLIN)
        found: list[int] = []
        while len(found) < len(pipes):
            for reader, _ in poll.poll(20000):
                found.append(os.read(reader, 1000)[0])
                poll.unregister(reader)
        return sorted(found)

    say(batch(), gpu.step())
    here.ready()
    say(batch(), ended(pids), gpu.step())


@program("an io_uring, asked of the C library as libuv asks (Node, PyTorch's store), or epoll")
def io_uring(here: Here) -> None:
    gpu, end = Gpu(), socket.socketpair()
    ring = libc.syscall(425, 4, bytes(120))
    loop = select.epoll()
    if ring < 0:
        loop.register(end[0], select.EPOLLIN)
    say("step", gpu.step())
    here.ready()
    end[1].send(b"x")
    say(ring >= 0 or loop.poll(5) == [(end[0].fileno(), select.EPOLLIN)], gpu.step())
