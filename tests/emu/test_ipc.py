"""Legacy IPC: memory and events that one process of a job has and another opens.

On a real GPU the tests ask the same of the driver alone.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flowgpu.launch import GpuKind, choose_driver
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import Connection, Program
from tests.gpu.slots import seeing

BOTH = """
import base64
def holds(address, value, size):
    found = np.empty(size, np.uint8)
    ok(cu.cuMemcpyDtoH(found, address, size))
    return bool((found == value).all())
def named(text):
    handle = cu.CUipcMemHandle()
    handle.reserved = base64.b64decode(text)
    return handle
def opened(text, flags=1):
    return cu.cuIpcOpenMemHandle(named(text), flags)
def asked(name, address):
    kind = getattr(cu.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_RANGE_" + name)
    return int(ok(cu.cuPointerGetAttribute(kind, address)))
def code(result):
    return result[0].name.removeprefix("CUDA_ERROR_")
"""
OWNER = """
sizes = 100, 3 * MIB, 2 * MIB, 200
held = [int(ok(cu.cuMemAlloc(size))) for size in sizes]
for number, (address, size) in enumerate(zip(held, sizes)):
    ok(cu.cuMemsetD8(address, number + 1, size))
ok(cu.cuCtxSynchronize())
def handle(address):
    return base64.b64encode(bytes(ok(cu.cuIpcGetMemHandle(address)).reserved)).decode()
"""
Both = tuple[Program, Program, list[Connection], Engine | None]


HOW = [
    *(
        pytest.param(("emulated", engine), id=f"emulated-{engine.name.lower()}")
        for engine in Engine
    ),
    *(
        pytest.param(("nvidia", how), id=f"nvidia-{name}", marks=pytest.mark.gpu)
        for name, how in (("alone", None), *((one.name.lower(), one) for one in Engine))
    ),
]


@contextmanager
def two_programs(
    lane: GpuKind, engine: Engine | None, folder: Path, device: int = 0
) -> Iterator[Both]:
    """The owner of memory, who has some, and who is to open it, on `device`."""
    with ExitStack() as stack:
        stack.enter_context(seeing(lane, device + 1))
        environment: dict[str, str] = dict(os.environ)
        connections = []
        if engine is not None:
            environment = lib.intercepted(
                lib.bare_environment(folder, DEVICES=str(device + 1)), folder
            )
            environment["FLOWGPU_REAL_LIBCUDA"] = str(choose_driver(lane).libcuda)
            environment |= {"FLOWGPU_REPLAY": "1"} if engine is Engine.REPLAY else {}
            coordinator = stack.enter_context(lib.Coordinator(folder / "task.sock"))
        programs = []
        for start, source in (("start()", BOTH + OWNER), (f"start({device})", BOTH)):
            programs.append(stack.enter_context(Program(environment)))
            programs[-1].do(start)
            programs[-1].do(source)
            if engine is not None:
                connections.append(coordinator.accept())
        yield programs[0], programs[1], connections, engine


@pytest.fixture(params=HOW)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    with two_programs(*request.param, tmp_path) as made:
        yield made


def test_another_process_opens_reads_writes_and_closes_it(both: Both) -> None:
    owner, opener, *_ = both
    for number, size in enumerate((100, 3 << 20, 2 << 20, 200)):
        text = owner.do(f"handle(held[{number}])")
        opener.do(f"text, size = {text!r}, {size}")
        opener.do("at = int(ok(opened(text)))")
        assert opener.do(f"holds(at, {number + 1}, size)")
        assert opener.do("[int(word) for word in ok(cu.cuMemGetAddressRange(at))][1]") == size
        last = "at + size - 1"
        assert opener.do(f"asked('START_ADDR', {last}) == at and asked('SIZE', {last}) == size")
        opener.do(f"ok(cu.cuMemsetD8(at, {number + 50}, size)); ok(cu.cuCtxSynchronize())")
        assert owner.do(f"holds(held[{number}], {number + 50}, {size})")
        assert opener.do("code(cu.cuIpcCloseMemHandle(at))") == "CUDA_SUCCESS"
        assert opener.do("code(cu.cuIpcCloseMemHandle(at))") != "CUDA_SUCCESS"
        assert opener.do("int(ok(opened(text))) > 0"), "it cannot be opened again"
    assert (
        owner.do("[holds(a, n + 50, s) for n, (a, s) in enumerate(zip(held, sizes))]") == [True] * 4
    )


@pytest.mark.parametrize("how", HOW)
def test_a_process_on_another_device_opens_it_as_a_peer(
    how: tuple[GpuKind, Engine | None], tmp_path: Path
) -> None:
    with two_programs(*how, tmp_path, device=1) as (owner, opener, *_):
        opener.do(f"at = int(ok(opened({owner.do('handle(held[1])')!r})))")
        assert opener.do("holds(at, 2, 3 * MIB)")
        opener.do("ok(cu.cuMemsetD8(at + MIB, 60, MIB)); ok(cu.cuCtxSynchronize())")
        assert owner.do("[holds(held[1] + n * MIB, (2, 60, 2)[n], MIB) for n in range(3)]") == (
            [True] * 3
        )
        opener.do("kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL")
        assert opener.do("int(ok(cu.cuPointerGetAttribute(kind, at)))") == 0
        assert opener.do("code(cu.cuIpcCloseMemHandle(at))") == "CUDA_SUCCESS"


def test_it_is_open_once_however_often_it_was_opened(both: Both) -> None:
    owner, opener, *_ = both
    opener.do(f"text = {owner.do('handle(held[1] + 5)')!r}")
    opener.do("one, two = (int(ok(opened(text))) for _ in range(2))")
    assert opener.do("[one == two, holds(one, 2, 3 * MIB)]") == [True, True]
    assert opener.do("[code(cu.cuIpcCloseMemHandle(one)), holds(two, 2, 3 * MIB)]") == [
        "CUDA_SUCCESS",
        True,
    ]
    assert opener.do("code(cu.cuIpcCloseMemHandle(two))") == "CUDA_SUCCESS"
    assert opener.do("code(cu.cuIpcCloseMemHandle(two))") != "CUDA_SUCCESS"


def test_what_cannot_be_opened_is_told(both: Both) -> None:
    owner, opener, *_ = both
    owner.do("text = handle(held[1])")
    assert owner.do("code(opened(text))") == "INVALID_CONTEXT"  # its own
    text = owner.do("text")
    opener.do(f"text = {text!r}")
    assert opener.do("[code(opened(text, flags)) for flags in (0, 2)]") == ["INVALID_VALUE"] * 2
    owner.do("ok(cu.cuMemFree(held[1]))")
    assert opener.do("code(opened(text))") == "INVALID_VALUE"
    owner.end()
    assert opener.do("code(opened(text))") != "CUDA_SUCCESS"


def test_it_is_open_after_a_hand_over_of_both_where_it_was(both: Both) -> None:
    owner, opener, connections, engine = both
    if engine is None:
        pytest.skip("a driver by itself takes no checkpoint here")
    text = owner.do("handle(held[0])")
    opener.do(f"text, at = {text!r}, int(ok(opened({text!r})))")
    ghosts = [lib.Ghost() for _ in connections]
    for task, ghost in zip(connections, ghosts, strict=True):
        lib.export(task, ghost)
        assert task.gate(engine=engine).status == Status.OK
    for task in connections:
        task.ok(Message.HANDOVER)
    rows = [ghost.rows.values() for ghost in ghosts]
    (imported,) = (row for row in rows[1] if row.owner_id)
    assert imported.owner_low == connections[0].hello.token_low
    assert imported.owner_id in {row.id for row in rows[0] if not row.owner_id}
    assert ghosts[0].askers == {connections[1].hello.token_low: opener.process.pid}
    for task, ghost in list(zip(connections, ghosts, strict=True))[::-1]:
        assert lib.map_back(task, ghost).status == Status.OK
        ghost.close()
    for task in connections:
        task.ok(Message.OPEN)
    assert opener.do("holds(at, 1, 100)")
    opener.do("ok(cu.cuMemsetD8(at, 60, 100)); ok(cu.cuCtxSynchronize())")
    assert owner.do("holds(held[0], 60, 100)")
    assert opener.do("int(ok(opened(text))) == at")
    assert opener.do("[code(cu.cuIpcCloseMemHandle(at)) for _ in range(3)][:2]") == (
        ["CUDA_SUCCESS"] * 2
    )


EVENTS = """
def made(): return ok(cu.cuEventCreate(2 | 4))  # without timing, for other processes
def shown(event):
    handle = ok(cu.cuIpcGetEventHandle(event))
    return base64.b64encode(bytes(handle.reserved)).decode()
def taken(text):
    handle = cu.CUipcEventHandle()
    handle.reserved = base64.b64decode(text)
    return cu.cuIpcOpenEventHandle(handle)
"""
# Work that is in flight until the flag is set by another stream.
BLOCKED = """
flag = int(ok(cu.cuMemAlloc(64)))
ok(cu.cuMemsetD8(flag, 0, 64)); ok(cu.cuCtxSynchronize())
wait_for, stream, helper = function(b'wait_for'), ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
def block():
    ok(launch_wait(wait_for, flag, stream)); ok(cu.cuEventRecord(event, stream))
def let_go():
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper)); ok(cu.cuStreamSynchronize(helper))
"""


def test_an_event_of_another_process_is_waited_for(both: Both) -> None:
    owner, opener, connections, engine = both
    for program in (owner, opener):
        program.do(EVENTS)
    owner.do(BLOCKED)
    owner.do("event = made()")
    text = owner.do("shown(event)")
    opener.do(f"text = {text!r}")
    opener.do("there = ok(taken(text))")
    query = "cu.cuEventQuery(there)[0].name"
    assert opener.do(query) == "CUDA_SUCCESS", "it was never recorded"
    for turn in range(2):
        owner.do("block(); 0")
        assert opener.do(query) == "CUDA_ERROR_NOT_READY"
        opener.send("ok(cu.cuStreamWaitEvent(0, there, 0)); ok(cu.cuStreamSynchronize(0)); 1")
        assert not opener.answers_within(0.1)
        owner.do("let_go(); 0")
        assert opener.receive() == 1
        assert opener.do("ok(cu.cuEventSynchronize(there)) or 1") == 1
        assert opener.do(query) == "CUDA_SUCCESS"
        owner.do("ok(cu.cuStreamSynchronize(stream))")
        owner.do("ok(cu.cuMemsetD8(flag, 0, 64)); ok(cu.cuCtxSynchronize())")
        if engine is not None and not turn:
            # Nothing of it is the driver's: both are handed over, and come back.
            ghosts = [lib.Ghost() for _ in connections]
            for task, ghost in zip(connections, ghosts, strict=True):
                lib.export(task, ghost)
                assert task.gate(engine=engine).status == Status.OK
            for task, ghost in zip(connections, ghosts, strict=True):
                task.ok(Message.HANDOVER)
                assert lib.map_back(task, ghost).status == Status.OK
                task.ok(Message.OPEN)
                ghost.close()
    assert opener.do("code(cu.cuEventDestroy(there))") == "CUDA_SUCCESS"
    owner.end()
    assert opener.do("cu.cuEventQuery(ok(taken(text)))[0].name") == "CUDA_SUCCESS"


def test_an_event_that_is_not_for_others_has_no_handle_one_that_is_gone_is_done(
    both: Both,
) -> None:
    owner, opener, *_ = both
    for program in (owner, opener):
        program.do(EVENTS)
    assert owner.do("code(cu.cuEventCreate(4))") == "INVALID_VALUE"  # with timing
    owner.do("plain = ok(cu.cuEventCreate(2))")
    assert owner.do("code(cu.cuIpcGetEventHandle(plain))") != "CUDA_SUCCESS"
    owner.do("event = made()")
    text = owner.do("shown(event)")
    owner.do("ok(cu.cuEventDestroy(event))")
    assert opener.do(f"cu.cuEventQuery(ok(taken({text!r})))[0].name") == "CUDA_SUCCESS"


def test_nobody_takes_what_was_opened_for_a_mapping_of_the_programs(both: Both) -> None:
    owner, opener, *_ = both
    opener.do(f"at = int(ok(opened({owner.do('handle(held[1])')!r})))")
    for call in ("MemRetainAllocationHandle(at)", "MemUnmap(at, 4 * MIB)"):
        assert opener.do(f"code(cu.cu{call})") == "INVALID_VALUE"
    assert opener.do("holds(at, 2, 3 * MIB)")


def test_a_child_of_a_fork_has_none_of_it(both: Both) -> None:
    owner, opener, *_ = both
    text = owner.do("handle(held[1])")
    opener.do(f"text = {text!r}")
    owner.do(
        "import os\nchild = os.fork()\nif child == 0:\n    import time; time.sleep(60); os._exit(0)"
    )
    assert opener.do("holds(int(ok(opened(text))), 2, 3 * MIB)")
    pid = owner.do("child")
    owner.process.kill()
    owner.process.wait()
    try:
        # It was open already, so the process need not be asked. Nobody listens for it any more.
        assert opener.do("code(opened(text))") == "CUDA_SUCCESS"
        name = "@flowgpu-ipc-" + base64.b64decode(text)[8:24].hex()
        assert name not in Path("/proc/net/unix").read_text().split()
    finally:
        os.kill(pid, 9)
