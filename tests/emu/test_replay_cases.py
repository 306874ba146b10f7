"""Round trips of driver calls under the record, and what the replay engine refuses by name."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowgpu import launch
from flowgpu.launch import GpuKind
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.replay_cases import PRELUDE, WITHOUT_A_CASE, Case
from tests.emu.replay_cases_graphs import HELPERS, REFUSED_ON_A_GPU, UNREADABLE, Unreadable
from tests.emu.replay_refusals import LIVING, MANAGED, REFUSED, Living
from tests.emu.replay_run import CASES
from tests.emu.test_replay import LANES, Task, task_on
from tests.emu.test_replay_bare import answers_as_expected, skip_where_it_is_none
from tests.patience import SECONDS
from tools.gen_intercept import read_table


def test_every_recorded_function_has_a_round_trip() -> None:
    recorded = {row.family for row in read_table() if row.replay == "record"}
    covered = {family for case in CASES for family in case.families}
    assert covered | set(WITHOUT_A_CASE) == recorded
    assert not covered & set(WITHOUT_A_CASE)


@contextmanager
def _task(folder: Path, lane: GpuKind, devices: int = 1) -> Iterator[Task]:
    with task_on(lane, folder, devices) as task:
        task.do(f"lane = {lane!r}")
        task.do(PRELUDE)
        yield task


@pytest.fixture(params=LANES)
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Task]:
    with _task(tmp_path, request.param) as task:
        yield task


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_made_or_set_is_there_after_a_checkpoint(
    case: Case, lane: GpuKind, tmp_path: Path
) -> None:
    skip_where_it_is_none(case, lane)
    with _task(tmp_path, lane, case.devices) as task:
        task.do(case.setup)
        before = answers_as_expected(task, case.asks)
        for _ in range(2):
            task.checkpoint()
            assert answers_as_expected(task, case.asks) == before
        answers_as_expected(task, case.last)
        if lane == "emulated":
            answers_as_expected(task, case.ended)


@pytest.mark.parametrize("checkpoints", [1, 2, 3])
def test_a_program_ends_as_ever_after_checkpoints(checkpoints: int, task: Task) -> None:
    task.do("kernel = function(b'inc'); inc_of(kernel)")
    for _ in range(checkpoints):
        task.checkpoint()
    assert task.program.end() == 0


# By what they lead to; the numbers in it are of no interest.
DESCRIPTORS = """
import collections, os, re
def kinds():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(re.sub("[0-9]+", "N", os.readlink("/proc/self/fd/" + fd)))
        except OSError:
            pass
    return sorted(collections.Counter(links).items())
"""


def test_checkpoints_leave_no_descriptors(task: Task) -> None:
    task.do(f"{DESCRIPTORS}kernel = function(b'inc'); inc_of(kernel)")
    task.checkpoint()
    after_one = task.do("inc_of(kernel); kinds()")
    for _ in range(3):
        task.checkpoint()
        assert task.do("inc_of(kernel); kinds()") == after_one


@pytest.mark.parametrize("engine", [Engine.NATIVE, Engine.REPLAY])
def test_a_capture_makes_the_task_busy_until_it_ends(engine: Engine, task: Task) -> None:
    task.do(f"""
{HELPERS}
ok(cu.cuStreamBeginCapture(where, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(launch_inc(inc, data, 8, where))
""")
    reply = task.connection.gate(engine=engine)
    assert (reply.status, reply.detail) == (Status.BUSY, "a CUDA graph is being captured")
    task.do("""
ok(launch_inc(inc, data, 8, where))
executable = made_of(ok(cu.cuStreamEndCapture(where)))
""")
    task.checkpoint()
    assert task.do("launched(executable)") == [2] * 8


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_made_again_is_refused_by_name(family: str, task: Task) -> None:
    task.checkpoint()
    task.do(REFUSED[family])
    for reply in (task.ask(), task.connection.gate(engine=Engine.REPLAY)):
        assert (reply.status, reply.detail) == (Status.REFUSED, family)
    assert task.do("inc_of(function(b'inc'))") == 128
    assert task.connection.gate().status == Status.OK
    task.connection.ok(Message.OPEN)
    assert task.do("inc_of(function(b'inc'))") == 128


@pytest.mark.parametrize("one", LIVING, ids=lambda one: one.name)
def test_what_cannot_be_made_again_is_refused_while_it_lives(
    one: Living, task: Task, request: pytest.FixtureRequest
) -> None:
    if one.gpu_only and request.node.callspec.params["task"] == "emulated":
        pytest.skip("the emulated driver has no such thing")
    for _ in range(2):
        task.do(one.make)
        for reply in (task.ask(), task.connection.gate(engine=Engine.REPLAY)):
            assert (reply.status, reply.detail) == (Status.REFUSED, one.name)
        task.do(one.end)
        task.checkpoint()
        assert task.do("inc_of(function(b'inc'))") == 128


@pytest.mark.parametrize("linking", [False, True])
def test_a_librarys_managed_variables_are_refused_once_it_was_used(
    task: Task, linking: bool
) -> None:
    if linking:
        task.do(f"{MANAGED}from tests.emu.driver_cases_link import linked; code = linked(code)")
        task.checkpoint()
    else:
        task.do(MANAGED)
    task.do("library = ok(cu.cuLibraryLoadData(code, [unknown], [1], 1, [], [], 0))")
    task.do("kernel = ok(cu.cuLibraryGetKernel(library, b'inc'))")
    task.checkpoint()
    assert task.do("inc_of(kernel)") == 128
    for engine in (Engine.NATIVE, Engine.REPLAY):
        reply = task.connection.gate(engine=engine)
        assert (reply.status, reply.detail) == (Status.REFUSED, "managed variables of a module")
    assert task.do("inc_of(kernel)") == 128
    task.do("ok(cu.cuLibraryUnload(library))")
    task.checkpoint()


HEAP = """
entry = b".visible .entry"
declared = b".extern .func (.param .b64 block) malloc (.param .b64 bytes);"
module = ok(cu.cuModuleLoadData(PTX.replace(entry, declared + entry, 1)))
kernel = ok(cu.cuModuleGetFunction(module, b"inc"))
"""


def test_a_kernel_that_may_have_allocated_on_the_device_is_refused_once_it_was_launched(
    task: Task,
) -> None:
    task.do(HEAP)
    task.checkpoint()
    assert task.do("inc_of(kernel)") == 128
    reply = task.connection.gate(engine=Engine.REPLAY)
    wanted = "the device's heap (malloc in a kernel)"
    assert (reply.status, reply.detail) == (Status.REFUSED, wanted)
    assert task.do("inc_of(kernel)") == 128
    task.do("ok(cu.cuDevicePrimaryCtxReset(device))")  # the heap is gone with it
    task.checkpoint()


ENDED = {
    "kernel": "ok(cu.cuModuleUnload(module))",
    "event": "ok(cu.cuEventDestroy(outside))",
    "memory": "ok(cu.cuMemFree(data))",
}


@pytest.mark.parametrize("end", ENDED.values(), ids=ENDED)
def test_a_graph_that_has_lost_what_it_needs_is_refused(end: str, task: Task) -> None:
    task.do(
        """
module, data = ok(cu.cuModuleLoadData(PTX)), int(ok(cu.cuMemAlloc(4 * MIB)))
stream, outside = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(2))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ok(cu.cuMemsetD32Async(data, 5, 64, stream))
ok(launch_inc(ok(cu.cuModuleGetFunction(module, b"inc")), data, 64, stream))
ok(cu.cuEventRecordWithFlags(outside, stream, 1))
graph = ok(cu.cuStreamEndCapture(stream))
made = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphDestroy(graph))
"""
    )
    task.checkpoint()
    task.do(end)
    reply = task.connection.gate(engine=Engine.REPLAY)
    assert reply.status == Status.REFUSED
    assert reply.detail == "a graph executable of which a kernel, an event or memory has ended"
    task.do("ok(cu.cuGraphExecDestroy(made))")
    task.checkpoint()


def test_a_graph_executable_that_every_context_left_is_refused(task: Task) -> None:
    task.do("made = ok(cu.cuGraphInstantiate(ok(cu.cuGraphCreate(0)), 0))")
    task.checkpoint()
    task.do("ok(cu.cuDevicePrimaryCtxReset(device))")
    reply = task.connection.gate(engine=Engine.REPLAY)
    assert reply.status == Status.REFUSED
    assert reply.detail == "a graph executable where every context has ended"
    task.do("ok(cu.cuGraphExecDestroy(made))")
    task.checkpoint()


@pytest.mark.parametrize("lost", UNREADABLE, ids=lambda lost: lost.why.replace(" ", "_"))
def test_a_graph_that_cannot_be_made_again_is_refused_while_it_is_there(
    lost: Unreadable, task: Task
) -> None:
    task.do(lost.setup)
    task.checkpoint()
    task.do(lost.end)
    assert task.ask().status == Status.OK  # nobody reads a graph while the program may change it
    reply = task.connection.gate(engine=Engine.REPLAY)
    assert (reply.status, reply.detail) == (Status.REFUSED, f"a graph {lost.why}")
    task.do("ok(cu.cuGraphDestroy(graph))")
    task.checkpoint()


def test_what_graphs_hold_that_cannot_be_kept_is_refused_by_the_call() -> None:
    refused = {row.family for row in read_table() if row.replay == "refuse"}
    assert refused >= {
        "cuGraphAddMemAllocNode",
        "cuGraphAddMemFreeNode",
        "cuGraphAddBatchMemOpNode",
        "cuGraphAddExternalSemaphoresSignalNode",
        "cuGraphAddExternalSemaphoresWaitNode",
        "cuGraphConditionalHandleCreate",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("call", REFUSED_ON_A_GPU)
def test_what_only_a_real_driver_makes_is_refused_by_name(call: str, tmp_path: Path) -> None:
    with _task(tmp_path, "nvidia") as task:
        task.do(HELPERS + REFUSED_ON_A_GPU[call])
        reply = task.ask()
        assert (reply.status, reply.detail) == (Status.REFUSED, call)


def test_a_new_driver_sees_the_devices_that_it_is_told(task: Task) -> None:
    task.do("kernel = inc_of(function(b'inc'))")
    own = task.do("bytes(ok(cu.cuDeviceGetUuid(device)).bytes).hex()")
    count = task.do("ok(cu.cuDeviceGetCount())")
    row, none = (f"GPU-{uuid.UUID(text)}" for text in (own, "0" * 32))
    assert task.checkpoint(none, row) == ["cuInit: CUDA_ERROR_NO_DEVICE"]
    assert task.do("ok(cu.cuDeviceGetCount())") == 1 <= count
    task.checkpoint()  # as it was told
    assert task.do("ok(cu.cuDeviceGetCount())") == 1
    assert task.do("bytes(ok(cu.cuDeviceGetUuid(device)).bytes).hex()") == own
    assert task.do("inc_of(function(b'inc'))") == 128


def test_objects_end_in_any_order_between_checkpoints(task: Task) -> None:
    """Each round ends one kind of what the round before made, the outermost last."""
    task.do("kept = []")
    for ended in ("stream", "event", "module", "library", "context", "context"):
        task.do(
            """
made = {"context": ok(cu.cuCtxCreate(None, 0, device))}
made["stream"] = ok(cu.cuStreamCreate(1))
made["event"] = ok(cu.cuEventCreate(0))
ok(cu.cuEventRecord(made["event"], made["stream"]))
made["module"] = ok(cu.cuModuleLoadData(PTX))
made["function"] = ok(cu.cuModuleGetFunction(made["module"], b"inc"))
made["library"] = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
made["kernel"] = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(made["library"], b"inc"))))
ok(cu.cuCtxPopCurrent())
kept.append(made)
"""
        )
        task.checkpoint()
        task.do(
            f"""
end = {{"stream": cu.cuStreamDestroy, "event": cu.cuEventDestroy, "module": cu.cuModuleUnload,
       "library": cu.cuLibraryUnload, "context": cu.cuCtxDestroy}}["{ended}"]
made = kept[-1]
ok(cu.cuCtxPushCurrent(made["context"]))
ok(end(made.pop("{ended}")))
if "{ended}" == "context":
    made.clear()
else:
    made.pop({{"module": "function", "library": "kernel"}}.get("{ended}"), None)
    ok(cu.cuCtxPopCurrent())
"""
        )
        task.checkpoint()
        assert (
            task.do(
                """
for made in kept:
    if "context" not in made:
        continue
    ok(cu.cuCtxPushCurrent(made["context"]))
    for code in ("function", "kernel"):
        assert code not in made or inc_of(made[code], 64, made.get("stream", 0)) == 128
    assert "event" not in made or name(cu.cuEventQuery(made["event"])) == "CUDA_SUCCESS"
    ok(cu.cuCtxPopCurrent())
same(ok(cu.cuCtxGetCurrent()), primary)
"""
            )
            is True
        )


def test_what_was_created_and_destroyed_leaves_nothing(task: Task) -> None:
    task.do(
        """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
handle, handles = ctypes.c_uint64(), set()
def pairs():
    for _ in range(5000):
        assert lib.cuEventCreate(ctypes.byref(handle), 0) == 0
        handles.add(handle.value)
        assert lib.cuEventDestroy_v2(handle) == 0
    return len(handles)
pairs()
before = resident()
"""
    )
    handles = [task.do("pairs()") for _ in range(8)][-1]
    grown = task.do("resident() - before")
    print(f"{handles} handles, {grown} bytes more")
    assert handles <= 4200  # replay/handles.cpp lets 4096 ended ones rest
    assert grown < 2 << 20
    task.checkpoint()


def test_a_million_objects_that_have_ended_leave_nothing(tmp_path: Path) -> None:
    """Over a driver that does nothing, so that all of it is the record's."""
    driver = launch.library_dir().parent / "bin" / "libflowgpu_do_nothing_driver.so"
    there = f"-Wl,-rpath,{driver.parent}"
    program = lib.compile_program("pairs.c", tmp_path / "pairs", str(driver), there)
    environment = dict(os.environ) | {
        "LD_PRELOAD": str(launch.intercept_library()),
        "FLOWGPU_REAL_LIBCUDA": str(driver),
        "FLOWGPU_REPLAY": "1",
    }
    done = subprocess.run(
        [program, "1000000"], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    handles, grown = map(int, done.stdout.split())
    assert handles <= 4200  # replay/handles.cpp lets 4096 ended ones rest
    assert grown < 1 << 20


def test_every_thread_keeps_its_contexts(task: Task) -> None:
    """One thread is at the driver all the time and stops at the gate; others do nothing."""
    task.do(
        """
import queue, threading
contexts = [ok(cu.cuCtxCreate(None, 0, device)) for _ in range(3)]
for _ in contexts:
    ok(cu.cuCtxPopCurrent())
class Worker:
    def __init__(self, stack, busy):
        self.asked, self.answers = queue.Queue(), queue.Queue()
        self.stack, self.busy = stack, busy
        threading.Thread(target=self.work, daemon=True).start()
    def work(self):
        for context in self.stack:
            ok(cu.cuCtxPushCurrent(context))
        self.answers.put(None)
        while True:
            while self.busy and self.asked.empty():
                ok(cu.cuCtxSynchronize())
            self.answers.put(self.asked.get()())
    def run(self, body):
        self.asked.put(body)
        return self.answers.get()
def numbers():
    # The thread's stack, the current context first, by number; it is left as it was.
    found = []
    while int(context := ok(cu.cuCtxGetCurrent())):
        found.append([int(c) for c in contexts].index(int(context)))
        ok(cu.cuCtxPopCurrent())
    for number in reversed(found):
        ok(cu.cuCtxPushCurrent(contexts[number]))
    return found
workers = [Worker(contexts[:2], True), Worker(contexts[1:], False), Worker([], False)]
for worker in workers:
    worker.answers.get()
"""
    )
    stacks = [[1, 0], [2, 1], []]
    assert task.do("[worker.run(numbers) for worker in workers]") == stacks
    for _ in range(2):
        task.checkpoint()
        assert task.do("[worker.run(numbers) for worker in workers]") == stacks
        assert task.do("same(ok(cu.cuCtxGetCurrent()), primary)") is True
    task.checkpoint()
    # The first call after it may be any.
    assert task.do("workers[1].run(lambda: inc_of(function(b'inc')))") == 128
    assert task.do("workers[2].run(lambda: name(cu.cuCtxSynchronize()))") == "INVALID_CONTEXT"
