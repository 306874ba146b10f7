"""The replay engine in a task: CUDA ends and is made anew, and the program does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator import holding
from coordinator.device_files import DeviceFiles
from coordinator.tasks import IS_CURRENT
from flowgpu import wire
from flowgpu.launch import GpuKind, choose_driver
from flowgpu.timeline import Recorder
from flowgpu.wire import Engine, GateState, ManagedStep, MapbackBytes, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import Connection, Ghost, Program
from tests.emu.replay_cases_arrays import HELPERS
from tests.emu.test_driver import nothing_is_left
from tests.gpu.slots import seeing


class Task:
    """A program that is prepared for the engine, and the coordinator's side of it."""

    def __init__(self, program: Program, connection: Connection) -> None:
        self.program = program
        self.connection = connection

    def do(self, source: str) -> object:
        return self.program.do(source)

    def ask(self) -> wire.Reply:
        packet = wire.Ask(Engine.REPLAY).pack()
        return self.connection.ask(Message.ASK, packet)

    def checkpoint(self, *visible: str, taking: Message = Message.LEND) -> list[str]:
        """Everything but the dump itself: the program's memory goes to a ghost and comes back.

        `visible`: the devices that it is told to see, by each REBUILD. Gives what they answer; the
        last succeeds.
        """
        packets = [wire.Rebuild(one).pack() for one in visible] or [None]
        ghost = Ghost()
        try:
            lib.export(self.connection, ghost)
            assert self.connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
            self.connection.ok(taking)
            self._exchange(ManagedStep.LEAVE, ManagedStep.LEAVE_HELD)
            stripped = self.connection.ok(Message.STRIP)
            failed = [self.connection.ask(Message.REBUILD, one).detail for one in packets[:-1]]
            rebuilt = self.connection.ok(Message.REBUILD, packets[-1])
            self._exchange(ManagedStep.COME, ManagedStep.COME_HELD)
            assert lib.map_back(self.connection, ghost).status == Status.OK
            self.connection.ok(Message.OPEN)
            for reply in (stripped, rebuilt):  # how long steps took, if that is worth a word
                assert re.fullmatch(r"(([A-Za-z ]+ \d+\.\d ms)(, |$))*", reply.detail), reply.detail
            assert not rebuilt.detail or "cuInit" in rebuilt.detail
            return failed
        finally:
            ghost.close()

    def _exchange(self, step: ManagedStep, held_step: ManagedStep) -> None:
        """Exchange managed memory for ordinary memory, or back."""
        with Path(f"/proc/{self.program.process.pid}/maps").open() as maps:
            if not any(line.startswith("18") for line in maps):  # its window
                return

        def ask(one: ManagedStep) -> bool:
            packet = wire.packet(Message.MANAGED, count=one)
            return bool(self.connection.ok(Message.MANAGED, packet).waited_us)

        while ask(step):
            with holding.held(self.program.process.pid):
                ask(held_step)


LANES = ["emulated", pytest.param("nvidia", marks=pytest.mark.gpu)]


@contextmanager
def task_on(
    lane: GpuKind, folder: Path, devices: int = 1, replay: bool = True, **device: str
) -> Iterator[Task]:
    libcuda = choose_driver(lane).libcuda
    with (
        seeing(lane, devices),
        lib.job(folder, replay, libcuda, DEVICES=str(devices), **device) as (_, program, channel),
    ):
        yield Task(program, channel)
    if lane == "emulated":
        nothing_is_left(folder / "device.log")  # of any of its lives


@pytest.fixture(params=LANES)
def task(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Task]:
    with task_on(request.param, tmp_path) as task:
        yield task


COUNTER = """
COUNTER = b'''
.version 7.0
.target sm_80
.address_size 64
.global .align 4 .u32 calls = 40;
.const .align 4 .u32 step = 1;
.visible .entry count(.param .u64 out) {
    .reg .u32 %r<4>;
    .reg .u64 %rd<4>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd1, %rd1;
    ld.global.u32 %r1, [calls];
    ld.const.u32 %r2, [step];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [calls], %r1;
    st.global.u32 [%rd1], %r1;
    ret;
}
\\0'''
out = int(ok(cu.cuMemAlloc(4)))
def count(kernel):
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((out,), (ctypes.c_uint64,)), 0))
    ok(cu.cuCtxSynchronize())
    return int(download(out, 1)[0])
"""


def test_memory_streams_events_and_kernels_live_on(task: Task) -> None:
    task.do(
        """
a = int(ok(cu.cuMemAlloc(1 << 20)))
ok(cu.cuMemsetD32(a, 5, 1 << 18))
stream = ok(cu.cuStreamCreateWithPriority(1, 0))
event = ok(cu.cuEventCreate(0))
fresh = ok(cu.cuEventCreate(0))
ok(cu.cuEventRecord(event, stream))
inc = function(b"inc")
dynamic = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ok(cu.cuFuncSetAttribute(inc, dynamic, 4096))
"""
    )
    for turn in range(3):
        task.checkpoint()
        assert task.do("int(download(a, 1 << 18).sum())") == (5 << 18) + 256 * turn
        assert task.do("ok(cu.cuFuncGetAttribute(dynamic, inc))") == 4096
        assert task.do("ok(cu.cuStreamGetPriority(stream)), ok(cu.cuStreamGetFlags(stream))") == [
            0,
            1,
        ]
        assert task.do("cu.cuEventQuery(event)[0].name") == "CUDA_SUCCESS"
        assert task.do("cu.cuEventElapsedTime(event, fresh)[0].name") == "CUDA_ERROR_INVALID_HANDLE"
        task.do("launch_inc(inc, a, 1 << 18, stream); ok(cu.cuStreamSynchronize(stream))")


def test_variables_of_modules_keep_what_kernels_wrote(task: Task) -> None:
    task.do(COUNTER)
    task.do(
        """
module = ok(cu.cuModuleLoadData(COUNTER))
kernel = ok(cu.cuModuleGetFunction(module, b"count"))
library = ok(cu.cuLibraryLoadData(COUNTER, [], [], 0, [], [], 0))
other = ok(cu.cuLibraryGetKernel(library, b"count"))
del COUNTER
"""
    )
    for turn in range(1, 4):
        assert task.do("count(kernel)") == 40 + turn
        assert task.do("count(ok(cu.cuKernelGetFunction(other)))") == 40 + turn
        task.checkpoint()
        assert task.do("int(ok(cu.cuFuncGetModule(kernel))) == int(module)")


BLOCKS = """
import os
large = int(ok(cu.cuMemAlloc(6 << 20)))
small = int(ok(cu.cuMemAlloc(1000)))
prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
handle = ok(cu.cuMemCreate(2 << 20, prop, 0))
own = int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)))
ok(cu.cuMemMap(own, 2 << 20, 0, handle, 0))
access = cu.CUmemAccessDesc()
access.location = prop.location
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(cu.cuMemSetAccess(own, 2 << 20, [access], 1))
for value, address in enumerate((large, small, own)):
    ok(cu.cuMemsetD8(address, 7 + value, 1000))
def bytes_there():
    found = bytearray(1000)
    said = []
    for address in (large, small, own):
        ok(cu.cuMemcpyDtoH(found, address, 1000))
        said.append([set(found).pop(), len(set(found))])
    return said
"""


@pytest.mark.parametrize("taking", [Message.LEND, Message.HANDOVER])
def test_memory_goes_with_cuda_or_before_it(task: Task, taking: Message) -> None:
    task.do(BLOCKS)
    counts = []
    for _ in range(3):
        task.checkpoint(taking=taking)
        assert task.do("bytes_there()") == [[7, 1], [8, 1], [9, 1]]
        counts.append(task.do("len(os.listdir('/proc/self/fd'))"))
    # The second and the third time each block has a descriptor, which goes with it.
    assert counts[1] == counts[2]


def test_a_task_that_has_lent_its_memory_and_was_not_stripped_needs_nothing_back(
    task: Task,
) -> None:
    task.do(BLOCKS)
    ghost = Ghost()
    try:
        lib.export(task.connection, ghost)
        assert task.connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
        # Nobody else has confirmed that he has the memory.
        assert task.connection.ask(Message.STRIP).status == Status.PROTOCOL
        task.connection.ok(Message.LEND)
        task.connection.ok(Message.REBUILD)
        assert lib.map_back(task.connection, ghost).status == Status.OK
        # From here on the memory is its own again.
        assert task.connection.ask(Message.STRIP).status == Status.PROTOCOL
        task.connection.ok(Message.OPEN)
    finally:
        ghost.close()
    assert task.do("bytes_there()") == [[7, 1], [8, 1], [9, 1]]
    task.checkpoint()
    assert task.do("bytes_there()") == [[7, 1], [8, 1], [9, 1]]


def test_what_a_task_had_is_freed_when_its_device_files_are_closed_elsewhere(
    tmp_path: Path,
) -> None:
    free = "int(ok(cu.cuMemGetInfo())[0])"
    with (
        lib.job(tmp_path, replay=True) as (_, program, connection),
        Program(lib.bare_environment(tmp_path)) as other,
    ):
        other.do("start()")
        program.do(BLOCKS)
        before, ghost = other.do(free), Ghost()
        files = DeviceFiles(True, Recorder())
        try:
            lib.export(connection, ghost)
            assert connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
            connection.ok(Message.LEND)
            files.hold(program.process.pid)
            connection.ok(Message.STRIP)
            assert other.do(free) == before
            files.let_go()
            files.wait_freed()
            # The device looks for itself after whom it has lost.
            lib.wait_until(lambda: other.do(free) > before, "the end of a context")
            connection.ok(Message.REBUILD)
            assert lib.map_back(connection, ghost).status == Status.OK
            connection.ok(Message.OPEN)
        finally:
            ghost.close()
        assert program.do("bytes_there()") == [[7, 1], [8, 1], [9, 1]]


def lend(connection: Connection, ghost: Ghost) -> None:
    """Up to the dump of a task that keeps what it has."""
    lib.export(connection, ghost)
    assert connection.gate(engine=Engine.REPLAY).status == Status.OK
    connection.ok(Message.LEND)
    connection.ok(Message.KEEP)


def test_a_task_that_lends_its_memory_goes_on_with_it(tmp_path: Path) -> None:
    with lib.job(tmp_path, replay=True) as (coordinator, program, connection):
        assert connection.hello.replay == IS_CURRENT
        program.do(COUNTER)
        program.do(
            """
kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(COUNTER)), b"count"))
free = int(ok(cu.cuMemGetInfo())[0])
"""
        )
        for turn in range(3):
            assert program.do("count(kernel)") == 41 + 2 * turn
            ghost = Ghost()
            lend(connection, ghost)
            assert connection.page.blocks == len(ghost.live)
            connection.ok(Message.DETACH)
            connection = coordinator.accept()
            assert (connection.hello.resumed, connection.page.gate) == (2, GateState.CLOSED)
            if turn == 1:  # who does not know what a task has gives it everything again
                connection.ok(Message.REBUILD)
                assert lib.map_back(connection, ghost).status == Status.OK
            connection.ok(Message.OPEN)
            ghost.close()
            assert program.do("count(kernel)") == 42 + 2 * turn
            assert program.do("int(ok(cu.cuMemGetInfo())[0]) == free")
        Task(program, connection).checkpoint()
        assert program.do("count(kernel)") == 47


def test_a_task_that_lends_its_memory_does_not_need_a_coordinator(tmp_path: Path) -> None:
    with lib.job(tmp_path, replay=True) as (coordinator, program, connection):
        program.do(COUNTER)
        program.do(
            "kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(COUNTER)), b'count'))"
        )
        ghost = Ghost()
        lend(connection, ghost)
        connection.peer.close()
        ghost.close()
        assert program.do("count(kernel)") == 41
        again = coordinator.accept()
        assert (again.hello.resumed, again.page.gate) == (0, GateState.OPEN)


def test_what_a_task_is_lent_in_another_order_is_refused(task: Task) -> None:
    for message in (Message.LEND, Message.KEEP):
        assert task.connection.ask(message).status == Status.PROTOCOL
    assert task.connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
    assert task.connection.ask(Message.LEND).status == Status.PROTOCOL
    task.connection.ok(Message.KEEP)
    task.connection.ok(Message.OPEN)
    assert task.do("1 + 1") == 2


def test_a_library_outlives_the_context_that_was_current_when_it_was_loaded(task: Task) -> None:
    task.do(COUNTER)
    task.do("""
second = ok(cu.cuCtxCreate(None, 0, 0))
library = ok(cu.cuLibraryLoadData(COUNTER, [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"count"))
ok(cu.cuCtxDestroy(second))
""")
    for turn in range(1, 4):
        assert task.do("count(ok(cu.cuKernelGetFunction(kernel)))") == 40 + turn
        task.checkpoint()
        assert task.do("int(ok(cu.cuLibraryGetKernel(library, b'count'))) == int(kernel)")


def test_a_program_that_asks_for_a_librarys_variable_after_kernels_have_run_is_refused(
    task: Task,
) -> None:
    task.do(COUNTER)
    task.do("library = ok(cu.cuLibraryLoadData(COUNTER, [], [], 0, [], [], 0))")
    task.checkpoint()
    task.do("count(ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b'count')))))")
    task.do("calls = int(ok(cu.cuLibraryGetGlobal(library, b'calls'))[0])")
    for reply in (task.ask(), task.connection.gate(engine=Engine.REPLAY)):
        assert (reply.status, reply.detail) == (
            Status.REFUSED,
            "the addresses of module variables: calls",
        )
    assert task.do("int(download(calls, 1)[0])") == 41
    task.do("ok(cu.cuLibraryUnload(library))")
    task.checkpoint()


# Two modules, so that a variable of the second has another place once the first has ended.
TABLE = """
TABLE = b'''
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 8 .b32 table[4] = {3, 1, 4, 1};
.visible .global .align 8 .b64 other;
'''
first, module = (ok(cu.cuModuleLoadData(TABLE)) for _ in range(2))
gone, library = (ok(cu.cuLibraryLoadData(TABLE, [], [], 0, [], [], 0)) for _ in range(2))
ask = {"module": cu.cuModuleGetGlobal, "library": cu.cuLibraryGetGlobal}
end = {"module": cu.cuModuleUnload, "library": cu.cuLibraryUnload}
"""


@pytest.mark.whole_gpu  # other tests' memory would count
@pytest.mark.parametrize("owner", ["module", "library"])
def test_a_variable_that_only_its_address_leads_to_stays_at_it(task: Task, owner: str) -> None:
    def table() -> object:
        return task.do("download(table, 4).tolist()")

    task.do(TABLE)
    begun = task.do("ok(cu.cuLibraryGetGlobal(gone, b'table')); ok(cu.cuMemGetInfo())[0]")
    task.do(f"address, size = ok(ask[{owner!r}]({owner}, b'table')); table = int(address)")
    task.do("ok(cu.cuModuleUnload(first)); ok(cu.cuLibraryUnload(gone))")
    assert (table(), task.do("size")) == ([3, 1, 4, 1], 16)
    for turn in range(1, 4):
        task.checkpoint()
        assert table() == [2 + turn, turn, 3 + turn, turn]
        assert task.do(f"int(ok(ask[{owner!r}]({owner}, b'table'))[0]) == table")
        assert task.do("[int(x) for x in ok(cu.cuMemGetAddressRange(table))] == [table, size]")
        task.do("launch_inc(function(b'inc'), table, 4)")
    task.do(f"ok(end[{owner!r}]({owner}))")
    assert task.do("cu.cuMemGetAddressRange(table)[0].name") == "CUDA_ERROR_NOT_FOUND"
    task.checkpoint()
    assert task.do("ok(cu.cuMemGetInfo())[0]") >= begun


def test_such_a_variable_has_a_place_in_each_context_and_ends_with_it(task: Task) -> None:
    task.do(TABLE)
    task.do("""
def place():
    return int(ok(cu.cuLibraryGetGlobal(library, b"table"))[0])
def value(at):
    return int(download(at, 1)[0])
places = [place()]
second = ok(cu.cuCtxCreate(None, 0, 0))
places.append(place())
ok(cu.cuMemsetD32(places[1], 7, 1))
""")
    task.checkpoint()
    assert task.do("[place() == places[1], value(places[0]), value(places[1])]") == [True, 3, 7]
    task.do("ok(cu.cuCtxDestroy(second))")
    assert task.do("place() == places[0]")
    task.do("third = ok(cu.cuCtxCreate(None, 0, 0)); places[1] = place()")
    assert task.do("value(places[1])") == 3
    task.checkpoint()
    assert task.do("[place() == places[1], value(places[1])]") == [True, 3]


def test_the_address_of_a_variable_that_is_asked_for_in_a_capture_is_the_drivers(
    task: Task,
) -> None:
    task.do(TABLE)
    task.do("""
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
at = int(ok(cu.cuModuleGetGlobal(module, b"table"))[0])
ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(stream))))
""")
    assert task.do("int(ok(cu.cuModuleGetGlobal(module, b'table'))[0]) == at")
    assert task.ask().detail == "the addresses of module variables: table"


def test_reservations_are_held_whatever_the_program_maps_beside_them(task: Task) -> None:
    task.do(
        """
host = [int(ok(cu.cuMemHostAlloc(1 << 20, 0))) for _ in range(8)]
own = [int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0))) for _ in range(3)]
"""
    )
    for _ in range(3):
        task.do("more = int(ok(cu.cuMemHostAlloc(1 << 20, 0)))")
        task.checkpoint()
        task.do("ok(cu.cuMemFreeHost(more))")
    task.do("[ok(cu.cuMemAddressFree(a, 2 << 20)) for a in own]")
    task.checkpoint()


# Takes all memory of the second device until its input ends.
TAKEN = """
import sys
from cuda.bindings import driver as cu
assert cu.cuInit(0)[0] == 0
assert cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(1)[1])[0] == 0
while cu.cuMemAlloc(2 << 20)[0] == 0:
    pass
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_primary_context_that_was_only_named_is_not_made_again(tmp_path: Path) -> None:
    # As cudart has those of all devices, in a program that uses one of them or none.
    with task_on("emulated", tmp_path, devices=2, MEMORY="1G") as task:
        task.do(
            """
from tests.emu.driver_lib import slots
(*_, primary_of) = slots("6bd5fb6c5bf4e74a8987d93912fd9df9", 3)
def named():
    found = ctypes.c_void_p()
    assert primary_of(ctypes.byref(found), ctypes.c_int(1)) == 0
    return found.value
def is_active():
    return ok(cu.cuDevicePrimaryCtxGetState(1))[1]
first = named()
"""
        )
        command = [sys.executable, "-c", TAKEN]
        environment = lib.bare_environment(tmp_path)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as taker:
            assert taker.stdout and taker.stdout.readline() == b"taken\n"
            for _ in range(2):
                task.checkpoint()
                assert task.do("[named() == first, is_active()]") == [True, 0]
        task.do("other = ok(cu.cuDevicePrimaryCtxRetain(1))")
        assert task.do("[int(other) == first, is_active()]") == [True, 1]
        task.checkpoint()
        assert task.do("[named() == first, is_active()]") == [True, 1]


def test_small_reservations_lie_where_the_driver_places_nothing_of_its_own(task: Task) -> None:
    # A driver that is made anew may have memory in the gaps that the one before it had.
    task.do(
        """
import os
own = [int(ok(cu.cuMemAddressReserve(size << 20, 0, 0, 0))) for size in (2, 10, 2, 30)]
ok(cu.cuMemAddressFree(own.pop(1), 10 << 20))
own += [int(ok(cu.cuMemAddressReserve(8 << 20, 8 << 20, 0, 0)))]
def child():
    pid = os.fork()
    if pid == 0:
        os._exit(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)[0])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    )
    assert task.do("[a >> 40 for a in own]") == [0x1C] * 4
    assert task.do("own[1] - own[0], own[3] - own[0]") == [12 << 20, 48 << 20]
    task.checkpoint()
    assert task.do("int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0))) - own[0]") == 2 << 20
    # What the driver refuses it refuses.
    assert task.do("cu.cuMemAddressReserve(3 << 20, 0, 0, 0)[0]") == 1
    assert task.do("cu.cuMemAddressFree(own[0], 4 << 20)[0]") == 1
    assert task.do("child()") != 0


def test_small_reservations_come_back_where_the_program_has_taken_the_usual_place(
    task: Task,
) -> None:
    task.do(
        """
import mmap
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000 | 0x4000
taken = libc.mmap(0x1C0000000000, 4 << 30, 0, fixed, -1, 0)
own = [int(ok(cu.cuMemAddressReserve(size << 20, 0, 0, 0))) for size in (2, 10, 2)]
"""
    )
    assert task.do("taken") == 0x1C0000000000
    assert not any(0 <= a - 0x1C0000000000 < 4 << 30 for a in task.do("own"))
    for _ in range(2):
        task.checkpoint()
        assert task.do("own[1] - own[0], own[2] - own[1]") == [2 << 20, 10 << 20]
    task.do("[ok(cu.cuMemAddressFree(a, s << 20)) for a, s in zip(own, (2, 10, 2))]")


@pytest.mark.parametrize("lane", LANES)
def test_reservations_come_back_where_the_driver_has_room_elsewhere(
    lane: GpuKind, tmp_path: Path
) -> None:
    # It looks for room in ranges that it has before it follows a wish, and takes the first.
    with task_on(lane, tmp_path, ROOM="128") as task:
        task.do(
            """
own = [int(ok(cu.cuMemAddressReserve(32 << 20, 0, 0, 0))) for _ in range(3)]
ok(cu.cuMemAddressFree(own.pop(0), 32 << 20))
for address in own:
    handle = ok(cu.cuMemCreate(2 << 20, properties(), 0))
    ok(cu.cuMemMap(address, 2 << 20, 0, handle, 0))
    ok(allow(address, 2 << 20))
    ok(cu.cuMemsetD32(address, address >> 20, 2))
"""
        )
        for _ in range(2):
            task.checkpoint()
            assert task.do("[int(download(a, 1)[0]) == a >> 20 for a in own]") == [True, True]


def test_each_thread_finds_its_stack_of_contexts(task: Task) -> None:
    task.do(
        """
import threading, queue
first = ok(cu.cuCtxGetCurrent())
second = ok(cu.cuCtxCreate(None, 0, 0))
ok(cu.cuCtxPopCurrent())
asked, answers = queue.Queue(), queue.Queue()
def work():
    ok(cu.cuCtxSetCurrent(second))
    ok(cu.cuCtxPushCurrent(first))
    while asked.get():
        top = int(ok(cu.cuCtxPopCurrent()))
        below = int(ok(cu.cuCtxGetCurrent()))
        ok(cu.cuCtxPushCurrent(first))
        answers.put([top, below])
thread = threading.Thread(target=work, daemon=True)
thread.start()
stack = [int(first), int(second)]
"""
    )
    for _ in range(2):
        task.checkpoint()
        assert task.do("asked.put(True); answers.get() == stack")
        assert task.do("int(ok(cu.cuCtxGetCurrent())) == int(first)")


# What leads into the driver without a call of it, each in a thread of its own.
WAYS_IN = {
    "exit": "ctypes.CDLL(None).exit(7)",
    "fork": "ended.append(os.waitpid(os.fork() or os._exit(0), 0)[1])",
    "the end of a thread": "ok(cu.cuCtxGetCurrent())",
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_what_libc_calls_in_the_driver_waits_at_the_gate(way: str, task: Task) -> None:
    task.do(
        f"""
import os, threading
go, ended = threading.Event(), []
def work():
    ok(cu.cuCtxGetCurrent())
    go.wait()
    {WAYS_IN[way]}
thread = threading.Thread(target=work)
thread.start()
"""
    )
    ghost = Ghost()
    try:
        lib.export(task.connection, ghost)
        assert task.connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
        # Later: a thread that forks keeps Python's lock, and the program could not answer.
        task.do("threading.Timer(0.2, go.set).start()")
        time.sleep(0.5)
        assert task.program.process.poll() is None
        task.connection.ok(Message.LEND)
        task.connection.ok(Message.STRIP)
        task.connection.ok(Message.REBUILD)
        assert lib.map_back(task.connection, ghost).status == Status.OK
        task.connection.send(Message.OPEN)  # which a program in exit() may not live to answer
    finally:
        ghost.close()
    if way == "exit":
        assert task.program.process.wait(lib.SECONDS) == 7
    else:
        assert task.connection.receive(Message.OPEN).status == Status.OK
        assert task.do("thread.join(); ended") == ([0] if way == "fork" else [])
        task.checkpoint()
        assert task.program.end() == 0


def test_what_is_made_of_memory_waits_for_its_bytes(tmp_path: Path) -> None:
    with task_on("emulated", tmp_path) as task:
        task.do(f"{HELPERS}\narray = fill(ok(cu.cuArray3DCreate(described(33, 7))), 5)")
        connection, ghost = task.connection, Ghost()
        lib.export(connection, ghost)
        assert connection.gate(60_000, engine=Engine.REPLAY).status == Status.OK
        connection.ok(Message.HANDOVER)
        connection.ok(Message.STRIP)
        files = [(ghost.fds[block], ghost.rows[block].size) for block in ghost.live]
        kept = [os.pread(fd, size, 0) for fd, size in files]
        assert any(map(any, kept))
        for fd, size in files:
            os.pwrite(fd, bytes(size), 0)
        connection.ok(Message.REBUILD)
        reply = lib.map_back(connection, ghost, their_bytes=MapbackBytes.TO_COME)
        assert (reply.status, reply.blocks) == (Status.OK, len(files))
        for (fd, _), data in zip(files, kept, strict=True):
            os.pwrite(fd, data, 0)
        reply = lib.map_back(connection, ghost, only=lambda block: False)
        assert (reply.status, reply.blocks) == (Status.OK, len(files))
        connection.ok(Message.OPEN)
        ghost.close()
        assert task.do("holds(array, 5)") is True


def test_registered_and_allocated_host_memory_is_registered_again(task: Task) -> None:
    task.do(
        """
host = int(ok(cu.cuMemHostAlloc(1 << 20, cu.CU_MEMHOSTALLOC_PORTABLE)))
own = np.full(1 << 20, 3, np.uint8)
ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
flags = [int(ok(cu.cuMemHostGetFlags(p))) for p in (host, own.ctypes.data)]
pages = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 20)).from_address(host))
pages[:] = 9
a = int(ok(cu.cuMemAlloc(1 << 20)))
ok(cu.cuMemcpyHtoD(a, host, 1 << 20))
"""
    )
    for _ in range(2):
        task.checkpoint()
        assert task.do("int(pages.min())") == 9
        assert task.do(
            "[int(ok(cu.cuMemHostGetFlags(p))) for p in (host, own.ctypes.data)] == flags"
        )
        assert task.do("int(download(a, 1 << 20, np.uint8).min())") == 9
    assert task.do("cu.cuMemHostUnregister(host)[0].name") == "CUDA_ERROR_INVALID_VALUE"
    task.do("ok(cu.cuMemFreeHost(host)); ok(cu.cuMemHostUnregister(own.ctypes.data))")


def test_a_registration_that_no_driver_takes_again_is_given_up_as_before(task: Task) -> None:
    """Nobody can open the memory, because it is sealed."""
    task.do(
        """
import mmap
libc = ctypes.CDLL(None, use_errno=True)
def sealed():
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ok(cu.cuMemHostRegister(address, 4096, 0))
    assert libc.mprotect(ctypes.c_void_p(address), 4096, 0) == 0
    return address, libc.syscall(462, ctypes.c_void_p(address), 4096, 0), memory
one, other = sealed(), sealed()
told = [cu.cuMemHostUnregister(one[0])[0].name for _ in range(2)]
"""
    )
    if task.do("one[1]") != 0:
        pytest.skip("this kernel seals no memory")
    for _ in range(2):
        task.checkpoint()
    assert task.do("[cu.cuMemHostUnregister(other[0])[0].name for _ in range(2)] == told")
    task.checkpoint()


def test_memory_of_a_pool_stays_where_it_is_over_checkpoints(task: Task) -> None:
    task.do("pool = [int(ok(cu.cuMemAllocAsync(n, 0))) for n in (4, 3 << 20)]")
    task.do("for n, p in enumerate(pool): ok(cu.cuMemsetD32(p, 40 + n, 1))")
    for _ in range(3):
        assert task.ask().status == Status.OK
        task.checkpoint()
        assert task.do("[int(download(p, 1)[0]) for p in pool]") == [40, 41]
        task.do("pool.append(int(ok(cu.cuMemAllocAsync(64, 0))))")
        task.do("ok(cu.cuMemFreeAsync(pool.pop(), 0)); ok(cu.cuCtxSynchronize())")
    task.do("for p in pool: ok(cu.cuMemFreeAsync(p, 0))")
    task.checkpoint()


HAMMER = """
import random, threading
wrong, rounds, stop = [], [0, 0, 0], threading.Event()
def hammer(number):
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    stream, draw, held = ok(cu.cuStreamCreate(1)), random.Random(number), {}
    def free(address):
        word = held.pop(address)
        found = download(address, 4)
        if (found != word).any():
            wrong.append((number, hex(address), word, list(found)))
        ok(cu.cuMemFreeAsync(address, stream))
    while not stop.is_set() and not wrong:
        if len(held) > 8:
            free(draw.choice(list(held)))
        address = int(ok(cu.cuMemAllocAsync(draw.choice([16, 4096, 3 << 20]), stream)))
        held[address] = draw.randrange(1 << 30)
        ok(cu.cuMemsetD32Async(address, held[address], 4, stream))
        ok(cu.cuStreamSynchronize(stream))
        rounds[number] += 1
    for address in list(held):
        free(address)
    ok(cu.cuStreamSynchronize(stream))
threads = [threading.Thread(target=hammer, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
"""


def test_threads_take_and_give_memory_of_a_pool_between_checkpoints(task: Task) -> None:
    task.do(HAMMER)
    for _ in range(12):
        before = task.do("list(rounds)")
        assert task.ask().status == Status.OK
        task.checkpoint()
        lib.wait_until(lambda b=before: task.do("min(rounds)") > min(b) + 3, "work after it")
    task.do("stop.set()")
    task.do("for thread in threads: thread.join()")
    assert task.do("wrong") == []
    task.checkpoint()


def test_a_process_that_is_not_prepared_says_so(tmp_path: Path) -> None:
    with lib.job(tmp_path) as (_, program, connection):
        reply = Task(program, connection).ask()
        assert (reply.status, connection.hello.replay) == (Status.REFUSED, 0)
        assert reply.detail == "the job was started with --engine native"


# Anonymous, private, and there or nowhere: what the library would have for its handles.
TAKE_HANDLES = """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
hex(libc.mmap(ctypes.c_void_p(0x1f0000000000), ctypes.c_size_t(4096), 0, 0x100022, -1, 0))
"""


def test_a_process_that_could_not_be_prepared_says_why_and_works(tmp_path: Path) -> None:
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    with (
        lib.Coordinator(tmp_path / "task.sock") as coordinator,
        Program(environment | {"FLOWGPU_REPLAY": "1"}) as program,
    ):
        assert program.do(TAKE_HANDLES) == "0x1f0000000000"
        program.do("start()")
        connection = coordinator.accept()
        assert connection.hello.replay == IS_CURRENT
        reply = Task(program, connection).ask()
        assert (reply.status, reply.detail) == (
            Status.REFUSED,
            "the addresses of handles are taken",
        )
        assert program.do("int(ok(cu.cuMemAlloc(4))) > 0")
