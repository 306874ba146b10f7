"""Memory that several processes have: what becomes of it when a checkpoint fails or is taken over,
and of processes that are not of the job.

That it comes back at all is shown with the workload `sharing`, by the tests of every workload.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.client import Connection, what_became
from flowgpu.errors import CoordinatorGone, CoordinatorReplaced, SharedOutside
from flowgpu.host.proctree import tree_pids
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from flowgpu.launch import EngineChoice
from tests.emu import test_checkpoint
from tests.emu.test_checkpoint import (
    Run,
    command,
    emulated_machine,
    flowgpu,
    lives_through,
    undisturbed,
)
from tests.faults.lanes import lane
from tests.unit.coordinator_job import Jobs, wait_for

runtime_dir, runs = test_checkpoint.runtime_dir, test_checkpoint.runs

ENGINES = ("native", "replay")
STEPS = 24
PRELUDE = """
import base64, os, sys, time
from pathlib import Path
from cuda.bindings import driver as cu
def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None
folder = Path(sys.argv[1])
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.005)
def tell(name, text=""):
    part = folder / f"part{os.getpid()}"
    part.write_text(text)
    part.rename(folder / name)
def begin():
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
def named(text):
    handle = cu.CUipcMemHandle()
    handle.reserved = base64.b64decode(text)
    return handle
def handle_of(address):
    return base64.b64encode(bytes(ok(cu.cuIpcGetMemHandle(address)).reserved)).decode()
def opened(text):
    return int(ok(cu.cuIpcOpenMemHandle(named(text), 1)))
def first(address):
    ok(cu.cuCtxSynchronize())
    found = bytearray(1)
    ok(cu.cuMemcpyDtoH(found, address, 1))
    return found[0]
"""


def root_of(run: Run) -> int:
    return Registry().find(run.name).root_pid


@pytest.mark.parametrize("engine", ENGINES)
def test_failed_checkpoints_change_nothing(engine: str, runs: Any, tmp_path: Path) -> None:
    faults = ["handover", "strip", "criu_dump", "ghost_death", "ghost_import"]
    said = lives_through(faults, "sharing", runs, tmp_path, "--engine", engine)
    assert said == undisturbed("sharing")


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_is_not_given_back_at_first_is_given_back_then(
    engine: str, runs: Any, tmp_path: Path
) -> None:
    words = command("sharing")
    run: Run = runs(f"mapback-{engine}", words, "mapback:2", "--engine", engine)
    run.wait_lines(5)
    # With the engine replay the first of them keeps its memory; so it fails once more.
    for number in range(2):
        options = ["--leave-running"] if number else ["--leave-running", "--engine", "native"]
        run.dump(tmp_path / f"image{number}", *options)
    assert run.end() == 0
    assert run.lines == undisturbed("sharing")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs whose first coordinator is killed at a point of a checkpoint."""
    with lane("emulated", tmp_path_factory.mktemp("jobs")) as found:
        found.coordinator = (sys.executable, "-P", "-m", "tests.faults.dying")
        yield found


@pytest.mark.parametrize(
    ("point", "engine", "options"),
    [
        ("handover", "native", {}),
        ("handover", "replay", {}),
        ("handover", "replay", {"leave_running": True}),
        ("mapback", "native", {"leave_running": True}),
        ("strip,mapback,mapback", "replay", {}),
    ],
)
def test_a_coordinator_that_dies_with_the_memory_costs_nothing(
    jobs: Jobs, tmp_path: Path, point: str, engine: EngineChoice, options: dict[str, bool]
) -> None:
    hurry = tmp_path / "hurry"
    job = jobs.run(
        command("sharing", steps=STEPS, **{"step-delay": 0.05}),
        task_env={"WORKLOAD_HURRY": str(hurry)},
        coordinator_env={"DIE_AT": point},
        engine=engine,
    )
    job.wait_steps(8)
    with Connection(job.directory.control_socket, "it") as connection:
        connection.send("pause-and-dump", output=str(tmp_path / "image"), **options)
        with pytest.raises(CoordinatorGone):
            connection.result()
        assert isinstance(what_became(connection), CoordinatorReplaced), job.log
    job.dump(tmp_path / "again", leave_running=True)
    hurry.touch()
    wait_for(lambda: job.record.state == "exited", "the end")
    assert job.record.exit_code == 0, job.log
    lines = job.directory.output_log.read_text().splitlines()
    assert lines == undisturbed("sharing", STEPS)
    again = jobs.restore(tmp_path / "again")
    wait_for(lambda: again.record.state == "exited", "the end of the restored one")
    assert again.directory.output_log.read_text().splitlines() == lines


@pytest.mark.parametrize("engine", ENGINES)
def test_kernels_that_wait_for_each_other_are_met_where_both_have_ended(
    engine: str, runs: Any, tmp_path: Path
) -> None:
    """A process whose kernel waits for one that stays behind a gate is let go on, and so is the
    other: the gates are closed again at another moment."""
    words = command("all_reduce", **{"step-delay": 0.001})
    run: Run = runs(f"waits-{engine}", words, "", "--engine", engine)
    for number in range(3):
        run.wait_more(2)
        run.dump(tmp_path / f"image{number}", "--leave-running")
    run.dump(tmp_path / "last")
    assert run.end() == 75
    expected = undisturbed("all_reduce")
    for name in ("image1", "last"):
        restored = flowgpu("restore", tmp_path / name)
        assert restored.returncode == 0, restored.stderr
        log = (tmp_path / name / "output.log").read_text().splitlines()
        assert log + restored.stdout.splitlines() == expected


def test_one_process_a_gpu_and_each_has_memory_of_the_others(runs: Any, tmp_path: Path) -> None:
    expected = undisturbed("sharing")  # wherever the memory is
    for engine in ENGINES:
        with emulated_machine(FLOWGPU_EMU_DEVICES="2"):
            run: Run = runs(f"two-{engine}", command("sharing", gpus=2), "", "--engine", engine)
            run.wait_lines(8)
            run.dump(tmp_path / engine)
            assert run.end() == 75
            manifest = Image(tmp_path / engine).manifest
            assert len(manifest.gpus) == 2
            assert {one.device for one in manifest.imports} == {0, 1}
            restored = flowgpu("restore", tmp_path / engine)
            assert restored.returncode == 0, restored.stderr
            assert run.lines + restored.stdout.splitlines() == expected


def test_an_image_has_each_byte_once_and_says_whose_the_imports_are(
    runs: Any, tmp_path: Path
) -> None:
    run: Run = runs("once", command("sharing"))
    run.wait_lines(8)
    run.dump(tmp_path / "image")
    assert run.end() == 75
    manifest = Image(tmp_path / "image").manifest
    blocks = {(block.task, block.id) for gpu in manifest.gpus for block in gpu.blocks}
    # Two blocks of owners, one of whom the third has let go of, that of the guest that has ended,
    # and a block of small allocations for each: the guest's has an importer left too.
    assert len(manifest.tasks) == 3 and len(blocks) == 4 + 4
    assert all((one.owner, one.block) in blocks for one in manifest.imports)
    assert not {(one.task, one.id) for one in manifest.imports} & blocks
    assert all(any(one.task == task for one in manifest.imports) for task in range(3))


OWNER = """
begin()
memory = ok(cu.cuMemAlloc(3 << 20))
ok(cu.cuMemsetD8(memory, 5, 3 << 20))
tell("handle", handle_of(memory))
print("ready", flush=True)
wait("over")
print(first(memory), flush=True)
"""
TAKER = """
wait("handle")
begin()
at = opened((folder / "handle").read_text())
ok(cu.cuMemsetD8(at, 6, 1))
print(first(at), flush=True)
wait("end")
"""


def test_a_process_of_another_job_is_named_on_both_sides(runs: Any, tmp_path: Path) -> None:
    owner, taker = (
        runs(name, [sys.executable, "-c", PRELUDE + source, str(tmp_path)])
        for name, source in (("owner", OWNER), ("taker", TAKER))
    )
    wait_for(lambda: taker.lines == ["6"], "the import")
    for run, other in ((owner, taker), (taker, owner)):
        image = tmp_path / "image"
        done = flowgpu("pause-and-dump", run.name, "--output", image)
        assert done.returncode == SharedOutside.exit_code, done.stderr
        assert f"Process {root_of(run)} of job {run.name!r} shares" in done.stderr
        assert f"with process {root_of(other)}, which" in done.stderr
        assert not list(tmp_path.glob("image*"))
    (tmp_path / "end").touch()
    assert taker.end() == 0
    owner.dump(tmp_path / "image")
    (tmp_path / "over").touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert (restored.returncode, restored.stdout) == (0, "6\n"), restored.stderr


# A ticket that nobody has taken out of the socket yet, and that alone keeps the memory.
ON_ITS_WAY = """
import socket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
KIND = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
SIZE = 2 << 20
def mapped(handle):
    at = int(ok(cu.cuMemAddressReserve(SIZE, 0, 0, 0)))
    ok(cu.cuMemMap(at, SIZE, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location.type = DEVICE
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(at, SIZE, [access], 1))
    return at
child = os.fork()
begin()
if child == 0:
    tell("begun")
    wait("over")
    fd = socket.recv_fds(theirs, 10, 1)[1][0]
    print(first(mapped(ok(cu.cuMemImportFromShareableHandle(fd, KIND)))), flush=True)
    os._exit(0)
wanted = cu.CUmemAllocationProp()
wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
wanted.location.type = DEVICE
wanted.requestedHandleTypes = KIND
handle = ok(cu.cuMemCreate(SIZE, wanted, 0))
at = mapped(handle)
ok(cu.cuMemsetD8(at, 7, SIZE))
fd = int(ok(cu.cuMemExportToShareableHandle(handle, KIND, 0)))
socket.send_fds(ours, [b"x"], [fd])
os.close(fd)
ok(cu.cuMemUnmap(at, SIZE))
ok(cu.cuMemRelease(handle))
wait("begun")
print("ready", flush=True)
print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_ticket_on_its_way_arrives_after_a_restore(
    runs: Any, tmp_path: Path, engine: str
) -> None:
    words = [sys.executable, "-c", PRELUDE + ON_ITS_WAY, str(tmp_path)]
    run: Run = runs(f"way-{engine}", words, "", "--engine", engine)
    wait_for(lambda: "ready" in run.lines, "the message")
    run.dump(tmp_path / "image")
    (tmp_path / "over").touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert (restored.returncode, restored.stdout) == (0, "7\n0\n"), restored.stderr


# A parent without CUDA whose forked children share, and of whom one ends first.
FORKED = """
def child(number):
    begin()
    own = int(ok(cu.cuMemAlloc(5 << 20)))
    ok(cu.cuMemsetD8(own, number, 5 << 20))
    tell(f"handle{number}", handle_of(own))
    other = 3 - number
    wait(f"handle{other}")
    theirs = opened((folder / f"handle{other}").read_text())
    tell(f"has{number}")
    wait(f"has{other}")
    if number == 2:
        wait("leave")
        os._exit(0)
    print("ready", flush=True)
    wait("over")
    ok(cu.cuMemsetD8(theirs + 1, 9, 1))
    print(first(own), first(theirs), first(theirs + 1), flush=True)
    os._exit(0)
children = [os.fork() or child(number) for number in (1, 2)]
print([os.wait()[1] for _ in children], flush=True)
"""


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_owner_that_ends_has_given_is_saved_and_comes_back(
    runs: Any, tmp_path: Path, engine: str, leaves: bool
) -> None:
    words = [sys.executable, "-c", PRELUDE + FORKED, str(tmp_path)]
    run: Run = runs(f"forked-{engine}-{leaves}".lower(), words, "", "--engine", engine)
    wait_for(lambda: "ready" in run.lines, "the import")
    if leaves:
        (tmp_path / "leave").touch()
        wait_for(lambda: len(tree_pids(root_of(run))) == 2, "the end of the owner")
    run.dump(tmp_path / "first", "--leave-running")
    run.dump(tmp_path / "second")
    for name in ("leave", "over"):
        (tmp_path / name).touch()
    for name in ("first", "second"):
        restored = flowgpu("restore", tmp_path / name)
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout == "1 2 9\n[0, 0]\n"
    manifest = Image(tmp_path / "second").manifest
    assert len(manifest.tasks) == (1 if leaves else 2)
    assert len(manifest.imports) == (0 if leaves else 2)
