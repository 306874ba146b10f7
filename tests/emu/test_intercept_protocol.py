"""The task's side of a checkpoint, asked by a coordinator and a ghost that the tests drive."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.process import service_threads
from flowgpu import wire
from flowgpu.host.sockets import PIDFD_GETFD
from flowgpu.wire import GateState, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import ROOM_BYTES, WINDOW, Connection, Coordinator, Ghost, Program

WORK = """
x = int(ok(cu.cuMemAlloc(64)))
ok(cu.cuMemsetD8(x, 7, 64))
y = bool((download(x, 64, np.uint8) == 7).all())
ok(cu.cuMemFree(x))
y
"""
Job = tuple[Coordinator, Program, Connection]

# Memory of every size, with contents that say where they belong.
FILL = """
sizes = [1, 512, 300 * 1024, 2 * MIB, 5 * MIB + 3] + [100] * 40
held = [int(ok(cu.cuMemAlloc(size))) for size in sizes]
for i, (address, size) in enumerate(zip(held, sizes)):
    ok(cu.cuMemsetD8(address, i + 1, size))
ok(cu.cuCtxSynchronize())
len(held)
"""
CHECK = """
all((download(a, s, np.uint8) == i + 1).all() for i, (a, s) in enumerate(zip(held, sizes)))
"""


@pytest.fixture
def task_job(tmp_path: Path) -> Iterator[Job]:
    with lib.job(tmp_path) as made:
        yield made


@pytest.fixture
def ghost() -> Iterator[Ghost]:
    made = Ghost()
    yield made
    made.close()


def goes_on(program: Program) -> bool:
    """The program still computes with what it has."""
    return bool(program.do(WORK))


def descriptors(program: Program) -> int:
    return len(os.listdir(f"/proc/{program.process.pid}/fd"))


def test_hello_names_the_task_and_brings_its_page(task_job: Job) -> None:
    _, program, task = task_job
    assert task.hello.pid == program.process.pid
    assert (task.hello.resumed, task.hello.device_count) == (0, 1)
    assert task.hello.driver_version >= 12000
    program.do("held = [int(ok(cu.cuMemAlloc(n))) for n in (1, 3 * MIB)]")
    page = task.page
    assert (page.magic, page.gate) == (wire.MAGIC, GateState.OPEN)
    assert (page.allocations, page.allocation_bytes) == (2, 1 + (3 << 20))
    assert (page.blocks, page.block_bytes) == (2, 6 << 20)
    program.do("[ok(cu.cuMemFree(a)) for a in held]")
    assert (task.page.allocations, task.page.allocation_bytes) == (0, 0)


def test_room_is_what_is_free_with_the_tasks_own_and_the_page_names_the_devices(
    task_job: Job,
) -> None:
    _, program, task = task_job
    assert (task.ok(Message.ROOM).block_bytes, task.page.devices) == (2**64 - 1, 0)
    program.do("held = int(ok(cu.cuMemAlloc(3 * MIB)))")
    free = program.do("int(ok(cu.cuMemGetInfo())[0])") + ROOM_BYTES
    context = program.do("int(ok(cu.cuCtxGetCurrent()))")
    assert (task.ok(Message.ROOM).block_bytes, task.page.devices) == (free, 1)
    program.do("more = int(ok(cu.cuMemAlloc(8 * MIB)))")
    assert task.ok(Message.ROOM).block_bytes == free - (8 << 20)
    assert program.do("int(ok(cu.cuCtxGetCurrent()))") == context
    task.close_gate()
    assert task.ok(Message.ROOM).block_bytes == free - (8 << 20)
    task.ok(Message.OPEN)
    assert goes_on(program)


def test_the_room_is_free_between_handover_and_mapback(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do("held = int(ok(cu.cuMemAlloc(8 * MIB)))")
    free = program.do("int(ok(cu.cuMemGetInfo())[0])")
    lib.export(task, ghost)
    assert task.page.block_bytes == 8 << 20
    task.close_gate()
    assert task.ok(Message.HANDOVER).block_bytes == 8 << 20
    # The blocks are the ghost's now; what the driver has free is all that it was, and the room.
    assert task.ok(Message.ROOM).block_bytes == free + ROOM_BYTES
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do("int(ok(cu.cuMemGetInfo())[0])") == free
    assert goes_on(program)


def test_a_whole_checkpoint_keeps_contents_addresses_and_the_current_context(
    task_job: Job, ghost: Ghost
) -> None:
    coordinator, program, task = task_job
    fds = descriptors(program)
    count = program.do(FILL)
    context = program.do("int(ok(cu.cuCtxGetCurrent()))")
    exported = lib.export(task, ghost)
    assert (exported.allocations, exported.blocks) == (count, task.page.blocks)
    # Between EXPORT and GATE the program goes on: blocks come and go.
    program.do("ok(cu.cuMemFree(held.pop(3))); sizes.pop(3)")
    program.do("held.append(int(ok(cu.cuMemAlloc(4 * MIB)))); sizes.append(4 * MIB)")
    program.do("[ok(cu.cuMemsetD8(a, i + 1, s)) for i, (a, s) in enumerate(zip(held, sizes))]")
    task.close_gate()
    assert task.page.gate == GateState.CLOSED
    addresses = {row.address for row in ghost.rows.values()}
    handed = task.ok(Message.HANDOVER)
    assert ghost.ended.is_set() and set(ghost.live) < set(ghost.rows)
    assert len(ghost.live) == handed.blocks and not addresses >= {
        row.address for row in ghost.rows.values()
    }
    assert all(WINDOW <= row.address < WINDOW + lib.WINDOW_BYTES for row in ghost.rows.values())
    task.ok(Message.DETACH)
    assert task.peer.recv(1) == b""
    again = coordinator.accept()
    assert again.hello.resumed == 1
    back = lib.map_back(again, ghost)
    assert (back.status, back.blocks) == (Status.OK, len(ghost.live))
    assert again.page.gate == GateState.CLOSED
    again.ok(Message.OPEN)
    assert again.page.gate == GateState.OPEN
    assert program.do(CHECK)
    assert program.do("int(ok(cu.cuCtxGetCurrent()))") == context
    assert goes_on(program)
    program.do("[ok(cu.cuMemFree(a)) for a in held]; ok(cu.cuCtxSynchronize())")
    assert descriptors(program) == fds + 1  # of the block kept for the next small allocation


def test_a_task_can_be_checkpointed_again_and_again(task_job: Job) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    for _ in range(5):
        ghost = Ghost()
        lib.hand_over(task, ghost)
        task.ok(Message.DETACH)
        task = coordinator.accept()
        assert lib.map_back(task, ghost).status == Status.OK
        task.ok(Message.OPEN)
        assert program.do(CHECK)
        ghost.close()


def test_a_checkpoint_that_is_off_changes_nothing(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(FILL)
    lib.export(task, ghost)
    task.ok(Message.DROP)
    ghost.thread.join(lib.SECONDS)
    assert not ghost.thread.is_alive(), "DROP left the channel open"
    assert task.ask(Message.HANDOVER).status == Status.PROTOCOL
    assert program.do(CHECK) and goes_on(program)


def test_a_task_without_memory_is_checkpointed_too(task_job: Job, ghost: Ghost) -> None:
    coordinator, program, task = task_job
    lib.hand_over(task, ghost)
    assert ghost.live == [] and ghost.rows == {}
    task.ok(Message.DETACH)
    again = coordinator.accept()
    assert again.hello.resumed == 1
    assert lib.map_back(again, ghost).status == Status.OK
    again.ok(Message.OPEN)
    assert goes_on(program)


@pytest.mark.parametrize("blocks", [64, 65, 200])
def test_more_blocks_than_one_message_takes(blocks: int, task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(f"held = [int(ok(cu.cuMemAlloc(2 * MIB))) for _ in range({blocks})];"
               "sizes = [64] * len(held)\n"
               "for i, a in enumerate(held): ok(cu.cuMemsetD8(a, (i + 1) % 256, 64))")  # fmt: skip
    lib.hand_over(task, ghost)
    assert len(ghost.live) == blocks
    assert lib.map_back(task, ghost).blocks == blocks
    task.ok(Message.OPEN)
    check = CHECK.replace("i + 1", "(i + 1) % 256")
    assert program.do(check)


def test_more_blocks_than_the_program_may_open_files(task_job: Job) -> None:
    """A block that has come back stays a descriptor, whatever the program's limit is."""
    _, program, task = task_job
    limit = "list(resource.getrlimit(resource.RLIMIT_NOFILE))"
    program.do("import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
               "resource.setrlimit(resource.RLIMIT_NOFILE, (120, hard))")  # fmt: skip
    program.do("held = [int(ok(cu.cuMemAlloc(2 * MIB))) for _ in range(300)]; sizes = [64] * 300\n"
               "for i, a in enumerate(held): ok(cu.cuMemsetD8(a, (i + 1) % 256, 64))")  # fmt: skip
    before = program.do(limit)
    for _ in range(2):
        ghost = Ghost()
        lib.hand_over(task, ghost)
        assert lib.map_back(task, ghost).blocks == 300
        task.ok(Message.OPEN)
        ghost.close()
        assert program.do(limit) == before
        assert program.do(CHECK.replace("i + 1", "(i + 1) % 256"))
    assert descriptors(program) > 300
    program.do("[ok(cu.cuMemFree(a)) for a in held]")
    assert descriptors(program) < 120


# --- wrong orders ---

OTHER_MESSAGES = [Message.HELLO, Message.REPLY, Message.BLOCKS, Message.LIVE, Message.END]


@pytest.mark.parametrize("kind", [Message.HANDOVER, Message.DETACH, *OTHER_MESSAGES])
def test_what_an_open_gate_does_not_allow(kind: Message, task_job: Job) -> None:
    _, program, task = task_job
    program.do(FILL)
    assert task.ask(kind).status == Status.PROTOCOL
    assert program.do(CHECK) and goes_on(program)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("kind", [Message.EXPORT, Message.MAPBACK])
def test_a_channel_is_one_descriptor(kind: Message, count: int, task_job: Job) -> None:
    _, program, task = task_job
    program.do(FILL)
    with open(os.devnull) as null:
        assert task.ask(kind, fds=(null.fileno(),) * count).status == Status.PROTOCOL
    assert program.do(CHECK) and goes_on(program)


def test_handover_needs_both_export_and_gate(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(FILL)
    task.close_gate()
    assert task.ask(Message.HANDOVER).status == Status.PROTOCOL
    task.ok(Message.OPEN)
    lib.export(task, ghost)
    assert task.ask(Message.HANDOVER).status == Status.PROTOCOL
    assert program.do(CHECK) and goes_on(program)


def test_a_closed_gate_is_not_closed_again_and_exports_nothing(task_job: Job) -> None:
    _, program, task = task_job
    program.do(FILL)
    task.close_gate()
    assert task.gate().status == Status.PROTOCOL
    with open(os.devnull) as null:
        assert task.ask(Message.EXPORT, fds=(null.fileno(),)).status == Status.PROTOCOL
    assert task.page.gate == GateState.CLOSED
    task.ok(Message.OPEN)
    task.ok(Message.OPEN)
    assert program.do(CHECK) and goes_on(program)


@pytest.mark.parametrize(
    "packet",
    [
        wire.packet(Message.GATE),
        wire.packet(Message.GATE, struct.pack("=II", 1000, 1)),
        wire.packet(Message.GATE, struct.pack("=III", 1000, 0, 0)),
    ],
    ids=["short", "reserved field", "long"],
)
def test_a_gate_request_of_another_form_is_refused(packet: bytes, task_job: Job) -> None:
    _, program, task = task_job
    assert task.ask(Message.GATE, packet).status == Status.PROTOCOL
    assert task.page.gate == GateState.OPEN and goes_on(program)


@pytest.mark.parametrize(
    "packet",
    [b"x", b"no header of ours" * 4, b"\0" * 16, wire.packet(Message.DROP) + b"more"],
    ids=["one byte", "text", "zeros", "longer than it says"],
)
def test_bytes_that_are_no_message_end_the_connection_only(packet: bytes, task_job: Job) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    task.peer.send(packet)
    assert task.peer.recv(1) == b""
    assert coordinator.accept().hello.resumed == 0
    assert program.do(CHECK) and goes_on(program)


def test_memory_that_is_away_is_not_handed_over_or_gated_again(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    with open(os.devnull) as null:
        assert task.ask(Message.EXPORT, fds=(null.fileno(),)).status == Status.PROTOCOL
    for ask in (
        lambda: task.gate(),
        lambda: task.ask(Message.HANDOVER),
        lambda: task.ask(Message.OPEN),
    ):
        assert ask().status == Status.PROTOCOL
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do(CHECK) and goes_on(program)


# --- giving back ---


def test_a_block_that_is_missing_keeps_the_gate_closed_until_it_comes(
    task_job: Job, ghost: Ghost
) -> None:
    _, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    missing = ghost.live[1]
    assert lib.map_back(task, ghost, lambda block: block != missing).status == Status.LOST
    assert task.ask(Message.OPEN).status == Status.PROTOCOL
    # The others are present by now: their rows are skipped.
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do(CHECK)


def test_rows_that_are_not_the_tasks_are_refused(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    block = ghost.live[0]
    row = ghost.rows[block]
    for wrong in (
        wire.Block(row.id + 1000, row.address, row.size, row.device, 0, 0, 0),
        wire.Block(row.id, row.address + (2 << 20), row.size, row.device, 0, 0, 0),
        wire.Block(row.id, row.address, row.size * 2, row.device, 0, 0, 0),
    ):
        ghost.rows[block] = wrong
        reply = lib.map_back(task, ghost, lambda candidate: candidate == block)
        assert (reply.status, reply.driver_result) == (Status.DRIVER, 1)
        assert f"{wrong.address:#x}" in reply.detail
    ghost.rows[block] = row
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do(CHECK)


def test_a_ghost_that_stops_giving_back_can_be_followed_by_another(
    task_job: Job, ghost: Ghost
) -> None:
    _, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    for packet in (b"", wire.packet(Message.BLOCKS, b"", 3), wire.packet(Message.LIVE)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            task.send(Message.MAPBACK, fds=(theirs.fileno(),))
            if packet:
                ours.send(packet)
        assert task.receive(Message.MAPBACK).status in (Status.SYSTEM, Status.PROTOCOL)
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do(CHECK)


# --- ends in the middle ---


def test_a_ghost_that_does_not_confirm_leaves_the_memory_with_the_task(task_job: Job) -> None:
    _, program, task = task_job
    program.do(FILL)
    for _ in range(2):
        ghost = Ghost(confirm=False)
        lib.export(task, ghost)
        task.close_gate()
        assert task.ask(Message.HANDOVER).status == Status.SYSTEM
        assert ghost.ended.is_set()
        ghost.close()
        task.ok(Message.OPEN)
        assert program.do(CHECK) and goes_on(program)


def test_a_ghost_that_is_gone_before_the_handover_leaves_the_memory_with_the_task(
    task_job: Job,
) -> None:
    _, program, task = task_job
    program.do(FILL)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        task.ok(Message.EXPORT, fds=(theirs.fileno(),))
    task.close_gate()
    assert task.ask(Message.HANDOVER).status == Status.SYSTEM
    task.ok(Message.OPEN)
    assert program.do(CHECK) and goes_on(program)


@pytest.mark.parametrize("point", ["hello", "export", "gate"])
def test_without_a_coordinator_a_task_that_has_its_memory_goes_on(
    point: str, task_job: Job, ghost: Ghost
) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    if point != "hello":
        lib.export(task, ghost)
    if point == "gate":
        task.close_gate()
    task.peer.close()
    assert program.do(CHECK) and goes_on(program)
    again = coordinator.accept()
    assert (again.hello.resumed, again.page.gate) == (0, GateState.OPEN)
    again.close_gate()
    again.ok(Message.OPEN)


@pytest.mark.parametrize("point", ["handover", "detach", "mapback"])
def test_without_its_memory_a_task_waits_for_another_coordinator(
    point: str, task_job: Job, ghost: Ghost
) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    if point == "detach":
        task.ok(Message.DETACH)
        coordinator.accept().peer.close()
    if point == "mapback":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            task.send(Message.MAPBACK, fds=(theirs.fileno(),))
    task.peer.close()
    program.send(CHECK)
    again = coordinator.accept()
    assert (again.hello.resumed, again.page.gate) == (1, GateState.CLOSED)
    assert not program.answers_within(0.1)
    assert lib.map_back(again, ghost).status == Status.OK
    assert not program.answers_within(0.05)
    again.ok(Message.OPEN)
    assert program.receive()


def test_a_coordinator_that_goes_during_the_handover_finds_the_task_waiting(
    task_job: Job, ghost: Ghost
) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    lib.export(task, ghost)
    task.close_gate()
    task.send(Message.HANDOVER)
    task.peer.close()
    again = coordinator.accept()
    assert again.hello.resumed == 1
    assert lib.map_back(again, ghost).status == Status.OK
    again.ok(Message.OPEN)
    assert program.do(CHECK)


def test_a_coordinator_that_will_not_have_the_task_is_not_asked_all_the_time(
    task_job: Job,
) -> None:
    coordinator, program, task = task_job
    task.close()
    coordinator.connections.remove(task)
    until = time.monotonic() + 1.0
    asked = 0
    while time.monotonic() < until:
        coordinator.accept().close()
        coordinator.connections.clear()
        asked += 1
    assert 1 <= asked < 20
    coordinator.accept().close_gate()
    coordinator.connections[0].ok(Message.OPEN)
    assert goes_on(program)


def test_a_detached_task_connects_when_the_coordinator_listens_again(
    task_job: Job, ghost: Ghost, tmp_path: Path
) -> None:
    coordinator, program, task = task_job
    program.do(FILL)
    lib.hand_over(task, ghost)
    coordinator.listener.close()
    coordinator.path.unlink()
    task.ok(Message.DETACH)
    with Coordinator(tmp_path / "task.sock") as second:
        again = second.accept()
        assert again.hello.resumed == 1
        assert lib.map_back(again, ghost).status == Status.OK
        again.ok(Message.OPEN)
        assert program.do(CHECK)


# --- busy and refused ---

BUSY = """
wait = function(b"wait_for")
flag = int(ok(cu.cuMemAlloc(4)))
ok(cu.cuMemsetD32(flag, 0, 1))
ok(cu.cuCtxSynchronize())
stream, helper = (ok(cu.cuStreamCreate(1)) for _ in range(2))
ok(launch_wait(wait, flag, stream))
"""
OTHER_STREAM = "ok(cu.cuMemsetD32Async(flag, 0, 1, helper)); ok(cu.cuStreamSynchronize(helper)); 1"


def test_a_thread_that_stays_in_the_driver_makes_the_task_busy(task_job: Job) -> None:
    _, program, task = task_job
    program.do(BUSY)
    program.do("import threading; context = ok(cu.cuCtxGetCurrent())\n"
               "def waiter():\n"
               "    ok(cu.cuCtxSetCurrent(context))\n"
               "    assert libcuda().cuStreamSynchronize(ctypes.c_void_p(int(stream))) == 0\n"
               "thread = threading.Thread(target=waiter, daemon=True)\n"
               "thread.start()")  # fmt: skip
    time.sleep(0.05)
    began = time.monotonic()
    assert task.gate(100).status == Status.BUSY
    assert 0.1 <= time.monotonic() - began < 5
    assert task.page.gate == GateState.OPEN and program.do(OTHER_STREAM)
    program.do("ok(cu.cuMemsetD32Async(flag, 1, 1, helper)); thread.join()")
    task.close_gate()
    task.ok(Message.OPEN)


def test_work_that_does_not_end_makes_the_task_busy(task_job: Job) -> None:
    _, program, task = task_job
    program.do(BUSY)
    for _ in range(3):
        began = time.monotonic()
        reply = task.gate(100)
        assert (reply.status, reply.detail) == (Status.BUSY, "work was still in flight")
        assert 0.1 <= time.monotonic() - began < 5
        assert task.page.gate == GateState.OPEN and program.do(OTHER_STREAM)
    program.do("ok(cu.cuMemsetD32Async(flag, 1, 1, helper))")
    task.close_gate()
    task.ok(Message.OPEN)
    assert goes_on(program)


def test_work_in_flight_is_done_when_the_gate_is_closed(task_job: Job) -> None:
    _, program, task = task_job
    program.do(BUSY)
    program.do("inc = function(b'inc'); data = int(ok(cu.cuMemAlloc(400)))")
    program.do("ok(cu.cuMemsetD32Async(data, 5, 100, stream))")
    program.do("ok(launch_inc(inc, data, 100, stream))")
    began = time.monotonic()
    task.send(Message.GATE, wire.Gate(5000, 0, 0, 0).pack())
    time.sleep(0.1)
    program.send("2")  # only the driver is behind the gate
    assert program.receive() == 2
    answered = bool(select.select([task.peer], [], [], 0)[0])
    assert not answered or time.monotonic() - began >= 5  # then it may have given up
    # The kernel waits for a flag that only somebody outside the gate could set.
    assert task.receive(Message.GATE).status == Status.BUSY
    program.do("ok(cu.cuMemsetD32Async(flag, 1, 1, helper))")
    task.close_gate()
    program.send("int(download(data, 100).sum())")
    assert not program.answers_within(0.05)
    task.ok(Message.OPEN)
    assert program.receive() == 600


def test_what_cannot_be_saved_refuses_by_name(task_job: Job, tmp_path: Path) -> None:
    _, program, task = task_job
    with Program(lib.bare_environment(tmp_path)) as stranger:
        stranger.do("start(); memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))")
        theirs = stranger.do("int(ok(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0)))")
        program.do(f"import ctypes, os; pidfd = os.pidfd_open({stranger.process.pid})")
        program.do(f"fd = ctypes.CDLL(None).syscall({PIDFD_GETFD}, pidfd, {theirs}, 0)")
    program.do("memory = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))")
    reply = task.gate()
    assert (reply.status, reply.detail) == (Status.REFUSED, "cuMemImportFromShareableHandle")
    assert task.page.gate == GateState.OPEN and goes_on(program)
    # Nor is it known later that nobody has the descriptor any more.
    program.do("import os; os.close(fd); ok(cu.cuMemRelease(memory))")
    assert task.gate().status == Status.REFUSED


def test_a_refused_function_that_failed_refuses_nothing(task_job: Job) -> None:
    _, program, task = task_job
    program.do("assert cu.cuMemExportToShareableHandle(0, fd_kind(), 0)[0] != R.CUDA_SUCCESS")
    task.close_gate()
    task.ok(Message.OPEN)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_threads_that_the_driver_starts_for_a_request_take_a_signal(
    replay: bool, blocked: bool, tmp_path: Path
) -> None:
    """They take over their maker's mask: by that signal replay ends them (native/rewind)."""
    with lib.job(tmp_path, replay=replay) as (_, program, task):
        program.do(BUSY)
        if blocked:
            program.do("import signal; signal.pthread_sigmask(0, {signal.SIGRTMAX}); 0")

        def taken() -> list[list[int]]:
            """Real-time signals that each of our threads takes."""
            pid = program.process.pid
            masks = []
            for thread in service_threads(pid):
                status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
                masks.append(int(status.partition("SigBlk:")[2].split()[0], 16))
            return [[s for s in signals if not mask >> (s - 1) & 1] for mask in masks]

        signals = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
        task.send(Message.GATE, wire.Gate(5000, 0, 0, 0).pack())
        let_in = [[signal.SIGRTMAX - blocked] if replay else []]
        # A thread takes its mask over a moment after it has been started.
        lib.wait_until(lambda: taken() == 2 * let_in, "a thread that waits for the work")
        assert task.receive(Message.GATE).status == Status.BUSY
        lib.wait_until(lambda: [] in taken(), "the service thread blocks all again")
        program.do("ok(cu.cuMemsetD32Async(flag, 1, 1, helper))")
