"""The gate in the mode WATCH: what it says of a call is what the call did to the emulated GPU.

Each copy and memset is made in memory that has another value everywhere, so what it wrote is read
from the memory, and compared with the ranges that were noted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import wire
from flowgpu.wire import GateState, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import Connection, Coordinator, Ghost, Program

Job = tuple[Coordinator, Program, Connection]
Spans = list[list[int]]
MOST = 1 << 16  # writes that are noted

SETUP = """
import ctypes
import threading
from tests.emu.array_lib import U8, shape
SIZE = 1 << 16
base, other = (int(ok(cu.cuMemAlloc(SIZE))) for _ in range(2))
host, source = np.empty(SIZE, np.uint8), np.full(SIZE, 0x55, np.uint8)
here, there = host.ctypes.data, source.ctypes.data
ok(cu.cuMemsetD8(other, 0x55, SIZE))
stream, context = ok(cu.cuStreamCreate(1)), ok(cu.cuCtxGetCurrent())
inc = function(b"inc")
array = ok(cu.cuArray3DCreate(shape(64, 0, 0, U8, 1, 0)))
ok(cu.cuMemcpyHtoA(array, 0, there, 64))
T = cu.CUmemorytype
HOST, DEVICE, UNIFIED = T.CU_MEMORYTYPE_HOST, T.CU_MEMORYTYPE_DEVICE, T.CU_MEMORYTYPE_UNIFIED
ARRAY = T.CU_MEMORYTYPE_ARRAY

def shaped(kind, to, address, **fields):
    copy = kind()
    copy.srcMemoryType, copy.srcDevice, copy.dstMemoryType = DEVICE, other, to
    if to == HOST:
        copy.dstHost = address
    else:
        copy.dstDevice = address
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy

def flat(to, address, **fields):
    given = dict(srcPitch=100, dstPitch=256, dstXInBytes=3, dstY=2, WidthInBytes=50, Height=7)
    return shaped(cu.CUDA_MEMCPY2D, to, address, **(given | fields))

def solid(to, address, **fields):
    given = dict(
        srcPitch=64, srcHeight=8, dstPitch=128, dstHeight=10, dstXInBytes=5, dstY=1, dstZ=2,
        WidthInBytes=33, Height=6, Depth=4,
    )
    return shaped(cu.CUDA_MEMCPY3D, to, address, **(given | fields))

def batch(number):
    where = cu.CUmemcpyAttributes()
    where.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    to = [cu.CUdeviceptr(base + 1000 * i) for i in range(number)]
    sizes = [10 + i for i in range(number)]
    return to, [cu.CUdeviceptr(other)] * number, sizes, number, [where], [0], 1, stream

def copies():
    one = cu.CUDA_MEMCPY3D_BATCH_OP()
    for operand, address in ((one.src, other), (one.dst, base + 64)):
        operand.type = cu.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        operand.op.ptr.ptr = address
    one.dst.op.ptr.rowLength, one.dst.op.ptr.layerHeight = 40, 5
    one.extent.width, one.extent.height, one.extent.depth = 20, 3, 2
    one.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return [one]

def operations():
    made = []
    for kind, at in (("WRITE_VALUE_32", 512), ("WAIT_VALUE_32", 512), ("WRITE_VALUE_64", 800)):
        one = cu.CUstreamBatchMemOpParams()
        one.operation = getattr(cu.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}")
        part = one.waitValue if kind.startswith("WAIT") else one.writeValue
        part.operation, part.address, part.value64 = one.operation, base + at, 0x5555555555555555
        made.append(one)
    return made

def before():
    ok(cu.cuMemsetD8(base, 0xAA, SIZE))
    host[:] = 0xAA
    ok(cu.cuCtxSynchronize())

def spans(address, changed):
    edges = np.flatnonzero(np.diff(np.concatenate(([0], changed.astype(np.int8), [0]))))
    return [[address + int(a), address + int(b)] for a, b in edges.reshape(-1, 2)]

def written():
    ok(cu.cuCtxSynchronize())
    on_host = spans(here, host != 0xAA)
    return sorted(on_host + spans(base, download(base, SIZE, np.uint8) != 0xAA))

def instantiated():
    graph, node = ok(cu.cuGraphCreate(0)), cu.CUDA_MEMSET_NODE_PARAMS()
    node.dst, node.value, node.elementSize, node.width, node.height = base, 1, 1, 64, 1
    ok(cu.cuGraphAddMemsetNode(graph, [], 0, node, context))
    return ok(cu.cuGraphInstantiate(graph, 0))

executable = instantiated()
"""

WRITES = [
    line
    for line in """
cuMemcpyHtoD(base + 11, there, 1000)
cuMemcpyHtoDAsync(base + 11, there, 70, stream)
cuMemcpyDtoD(base + 300, other, 4097)
cuMemcpyDtoDAsync(base, other, SIZE, stream)
cuMemcpyDtoH(here + 7, other, 200)
cuMemcpyDtoHAsync(here + 7, other, 201, stream)
cuMemcpy(base + 5, other, 6)
cuMemcpyAsync(base + 5, other, 7, stream)
cuMemcpyPeer(base + 40, context, other, context, 41)
cuMemcpyPeerAsync(base + 40, context, other, context, 42, stream)
cuMemcpyAtoD(base + 9, array, 8, 32)
cuMemcpyAtoH(here + 9, array, 8, 33)
cuMemcpyAtoHAsync(here + 9, array, 8, 34, stream)
cuMemcpy2D(flat(DEVICE, base))
cuMemcpy2D(flat(HOST, here))
cuMemcpy2D(flat(UNIFIED, base, dstPitch=50, dstXInBytes=0))
cuMemcpy2DUnaligned(flat(DEVICE, base, dstPitch=0, dstXInBytes=0))
cuMemcpy2DAsync(flat(DEVICE, base, Height=1), stream)
cuMemcpy3D(solid(DEVICE, base))
cuMemcpy3D(solid(HOST, here))
cuMemcpy3D(solid(DEVICE, base, dstPitch=0, dstHeight=0, dstXInBytes=0))
cuMemcpy3DAsync(solid(DEVICE, base, Depth=1), stream)
cuMemcpyBatchAsync(*batch(3))
cuMemcpy3DBatchAsync(1, copies(), 0, stream)
cuMemsetD8(base + 1, 0, 99)
cuMemsetD16(base + 2, 0, 99)
cuMemsetD32(base + 4, 0, 99)
cuMemsetD8Async(base + 1, 0, 98, stream)
cuMemsetD16Async(base + 2, 0, 98, stream)
cuMemsetD32Async(base + 4, 0, 98, stream)
cuMemsetD2D8(base + 1, 64, 0, 9, 5)
cuMemsetD2D16(base + 2, 64, 0, 9, 5)
cuMemsetD2D32(base + 4, 64, 0, 9, 5)
cuMemsetD2D8Async(base + 1, 64, 0, 8, 5, stream)
cuMemsetD2D16Async(base + 2, 64, 0, 8, 5, stream)
cuMemsetD2D32Async(base + 4, 64, 0, 8, 5, stream)
cuStreamWriteValue32(stream, base + 64, 1, 0)
cuStreamWriteValue64(stream, base + 64, 7, 0)
cuStreamBatchMemOp(stream, 3, operations(), 0)
""".splitlines()
    if line
]


@pytest.fixture(params=[False, True], ids=["native", "replay"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    with lib.job(tmp_path, replay=request.param) as made:
        made[1].do(SETUP)
        yield made


def watched(task: Connection) -> tuple[list[wire.Write], wire.Watched]:
    """What was noted since WATCH."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writes: list[wire.Write] = []
    with ours:
        ours.settimeout(lib.SECONDS)
        with theirs:
            task.send(Message.WRITTEN, fds=(theirs.fileno(),))
        while True:
            packet = ours.recv(1 << 16)
            kind, count, body = wire.split(packet)
            if kind is Message.WATCHED:
                assert task.receive(Message.WRITTEN).status == Status.OK
                return writes, wire.Watched.unpack(packet)
            assert kind is Message.WRITES and 0 < count <= wire.WRITES_PER_MESSAGE
            size = wire.Write.SIZE
            writes += [wire.Write.unpack(body[at * size :][:size]) for at in range(count)]


def spans(writes: list[wire.Write]) -> Spans:
    """The bytes of all of them, as ranges that do not meet."""
    rows = sorted(
        (write.address + i * write.slice + j * write.pitch, write.size)
        for write in writes
        for i in range(write.slices)
        for j in range(write.rows)
    )
    found: Spans = []
    for start, size in rows:
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], start + size)
        else:
            found.append([start, start + size])
    return found


def counts(end: wire.Watched) -> tuple[int, int, int, int, int]:
    return end.launches, end.writes, end.frees, end.arrays, end.missed


def test_every_copy_and_memset_is_noted_with_the_very_bytes_that_it_writes(job: Job) -> None:
    _, program, task = job
    for call in WRITES:
        program.do("before()")
        task.ok(Message.WATCH)
        assert task.page.gate == GateState.WATCH
        program.do(f"r = cu.{call}; assert r[0] == R.CUDA_SUCCESS, r")
        writes, end = watched(task)
        task.ok(Message.OPEN)
        assert counts(end) == (0, 1, 0, 0, 0), call
        assert spans(writes) == program.do("written()") != [], call


def test_a_copy_between_devices_by_a_structure_is_noted(job: Job) -> None:
    """The test looks at the arguments alone, where the emulated driver has no such function."""
    _, program, task = job
    task.ok(Message.WATCH)
    program.do(
        """
given = dict(srcPitch=64, srcHeight=8, dstPitch=128, dstHeight=10, dstXInBytes=5, dstY=1, dstZ=2,
             WidthInBytes=33, Height=6, Depth=4)
copy = shaped(cu.CUDA_MEMCPY3D_PEER, DEVICE, base, **given)
libcuda().cuMemcpy3DPeer(ctypes.c_void_p(int(copy.getPtr())))
"""
    )
    writes, end = watched(task)
    at = program.do("base") + 2 * 1280 + 128 + 5
    assert counts(end) == (0, 1, 0, 0, 0)
    assert writes == [wire.Write(at, 33, 128, 6, 1280, 4)]


def test_launches_frees_and_writes_into_arrays_are_counted(job: Job) -> None:
    _, program, task = job
    program.do("held = [int(ok(cu.cuMemAlloc(4096))) for _ in range(2)]")
    task.ok(Message.WATCH)
    program.do(
        """
ok(launch_inc(inc, base, 64))
ok(cu.cuGraphLaunch(executable, stream))
ok(cu.cuGraphLaunch(executable, stream))
ok(cu.cuMemcpyHtoA(array, 0, there, 64))
ok(cu.cuMemcpy2D(flat(ARRAY, 0, dstArray=array, dstXInBytes=0, dstY=0, Height=1)))
ok(cu.cuMemFree(held.pop()))
ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(512, stream)), stream))
ok(cu.cuFuncGetAttribute(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, inc))
ok(cu.cuCtxSynchronize())
"""
    )
    assert watched(task) == ([], wire.Watched(3, 2, 2, 2, 0))
    # Anew, and nothing while the gate is open.
    task.ok(Message.WATCH)
    assert watched(task) == ([], wire.Watched(0, 0, 0, 0, 0))
    task.ok(Message.OPEN)
    assert task.page.gate == GateState.OPEN
    program.do("before(); ok(cu.cuMemFree(held.pop()))")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert task.ask(Message.WRITTEN, fds=(theirs.fileno(),)).status == Status.PROTOCOL
    task.ok(Message.WATCH)
    assert watched(task) == ([], wire.Watched(0, 0, 0, 0, 0))


def test_calls_of_several_threads_are_all_noted(job: Job) -> None:
    _, program, task = job
    program.do("before()")
    task.ok(Message.WATCH)
    program.do(
        """
def work(number):
    ok(cu.cuCtxSetCurrent(context))
    for i in range(200):
        ok(cu.cuMemsetD8(base + 4096 * number + 3 * i, 1, 2))
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
"""
    )
    writes, end = watched(task)
    assert counts(end) == (0, 800, 0, 0, 0)
    assert len(writes) == 800 and spans(writes) == program.do("written()")


def test_a_call_that_waits_at_the_gate_is_noted_when_that_lets_it_go(job: Job) -> None:
    _, program, task = job
    program.do("before()")
    task.close_gate()
    program.send("ok(cu.cuMemsetD8(base, 1, 77))")
    assert not program.answers_within(0.2)
    task.ok(Message.WATCH)
    program.receive()
    writes, end = watched(task)
    assert counts(end) == (0, 1, 0, 0, 0) and spans(writes) == program.do("written()")


def test_what_finds_no_room_is_missed_and_not_lost_in_silence(job: Job) -> None:
    _, program, task = job
    task.ok(Message.WATCH)
    program.do(
        """
number = 70_000
to = (ctypes.c_uint64 * number)(*range(1, number + 1))
sizes = (ctypes.c_size_t * number)(*[1] * number)
size = ctypes.c_size_t
libcuda().cuMemcpyBatchAsync_v2(to, to, sizes, size(number), None, None, size(0), None)
"""
    )
    writes, end = watched(task)
    assert counts(end) == (0, 1, 0, 0, 70_000 - MOST)
    assert spans(writes) == [[1, MOST + 1]]


def test_a_checkpoint_follows_a_watch_and_a_lost_coordinator_ends_it(job: Job) -> None:
    coordinator, program, task = job
    program.do("before()")
    task.ok(Message.WATCH)
    ghost = Ghost()
    try:
        lib.hand_over(task, ghost)
        assert task.page.gate == GateState.CLOSED
        assert task.ask(Message.WATCH).status == Status.PROTOCOL  # the memory is away
        assert task.page.gate == GateState.CLOSED
        assert lib.map_back(task, ghost).status == Status.OK
    finally:
        ghost.close()
    task.ok(Message.WATCH)
    program.do("ok(cu.cuMemsetD8(base, 1, 78))")
    writes, _ = watched(task)
    assert spans(writes) == program.do("written()")
    task.peer.shutdown(socket.SHUT_RDWR)
    again = coordinator.accept()
    assert (again.hello.resumed, again.page.gate) == (0, GateState.OPEN)
    program.do("before()")


@pytest.mark.parametrize("notes", [wire.ExportNotes.NONE, wire.ExportNotes.BEGIN])
def test_what_may_be_written_of_the_host_is_told_after_an_export_that_asks(
    notes: wire.ExportNotes, job: Job
) -> None:
    _, program, task = job
    there = program.do("there")
    ghost = Ghost()
    lib.export(task, ghost, notes)
    copies = [line for line in WRITES if "(here" in line or "HOST" in line]
    assert len(copies) == 6
    touched = []
    for line in copies:
        touched += program.do(f"before()\nok(cu.{line})\nwritten()")
    program.do(
        "ok(cu.cuMemsetD8(base, 1, SIZE))\n"
        "ok(cu.cuMemHostRegister(there, 8192, 0))\nok(cu.cuMemHostUnregister(there))"
    )
    lib.export(task, other := Ghost(), wire.ExportNotes.GO_ON if notes else notes)
    ghost.close()
    task.close_gate()
    task.ok(Message.LEND)
    told = [(row.address, row.address + row.size) for row in other.host]
    if notes == wire.ExportNotes.NONE:
        assert told == []
    else:
        for start, end in [*touched, (there, there + 8192)]:
            assert any(low <= start and end <= high for low, high in told), hex(start)
        assert sum(high - low for low, high in told) < 1 << 18
    task.ok(Message.OPEN)
    other.close()
