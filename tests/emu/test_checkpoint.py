"""Checkpoint and restore on the real parts: intercept library, emulated GPU, mover, ghost, CRIU.

A workload's lines are the same in every run, so what was restored is compared with a run that
nobody disturbed. The same bodies serve for a real GPU in tests/gpu.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import ImageDamaged, NotEnoughDisk
from flowgpu.image.chunks import Kind
from flowgpu.image.reader import Image
from flowgpu.jobs import LIVE_STATES, Registry
from flowgpu.launch import emulator_socket
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for
from workloads._common import LAST_STEPS

ROOT = Path(__file__).resolve().parents[2]
FLOWGPU = [sys.executable, "-m", "flowgpu"]
# What a job of each kind adds: kernels and modules, many allocations, several processes in one
# tree, children that hold what they must not, memory that the program maps itself, graphs, threads,
# processes that have memory of one another.
WORKLOADS = (
    *("modules", "small_allocs", "processes", "forker", "segments", "graphs", "threads"),
    "sharing",
)
# Each costs the processor up to 50 ms.
STEPS, STEP_DELAY = 28, 0.15
RESERVED = 768 << 20
RESERVE = """
import os, runpy, sys
from cuda.bindings import driver
size = int(sys.argv[1])
driver.cuInit(0)
context = driver.cuDevicePrimaryCtxRetain(0)[1]
driver.cuCtxSetCurrent(context)
result, block = driver.cuMemAlloc(size)
assert int(result) == 0 and int(driver.cuMemsetD8(block, 0, size)[0]) == 0
del sys.argv[:2]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FEW_STEPS = 8


@contextmanager
def emulated_machine(**variables: str) -> Iterator[Path]:
    """A runtime folder with a path short enough for sockets; its emulated device, of which
    FLOWGPU_EMU_* variables say how it is, is ended."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="flowgpu-") as base,
    ):
        patch.setenv("FLOWGPU_RUNTIME_DIR", base)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield Path(base)
        end_emulator(emulator_socket(Path(base)))


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    with emulated_machine() as base:
        yield base


def end_emulator(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        # A daemon that has forked since it began to listen has another id; it ends by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(struct.unpack("iII", credentials)[0], signal.SIGTERM)


def command(workload: str, **options: object) -> list[str]:
    words = {"steps": STEPS, "step-delay": STEP_DELAY, **options}
    arguments = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return [sys.executable, str(ROOT / "workloads" / f"{workload}.py"), *arguments]


def reserving() -> list[str]:
    """A workload, in a process that takes RESERVED bytes at its start and lets them be, as JAX
    does."""
    python, *words = command("nbody")
    return [python, "-c", RESERVE, str(RESERVED), *words]


def flowgpu(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*FLOWGPU, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        check=False,
    )


class Run:
    """A `flowgpu run` under way, with its output in a file.

    A workload makes its steps slowly until somebody hurries it: however long commands take on a
    busy machine, they find it running. It is prepared for the engine native, if not another.
    """

    def __init__(
        self, name: str, words: list[str], folder: Path, fault: str = "", *options: str
    ) -> None:
        if "--engine" not in options:
            options = ("--engine", "native", *options)
        self.name = name
        self.out = folder / f"{name}.out"
        self.hurrying = folder / f"{name}.hurry"
        environment = {**os.environ, "WORKLOAD_HURRY": str(self.hurrying)}
        if fault:
            environment["FLOWGPU_FAULT"] = fault
        with open(self.out, "wb") as out, open(folder / f"{name}.err", "wb") as err:
            self.process = subprocess.Popen(
                [*FLOWGPU, "run", "--name", name, "--gpu", "emulated", *options, "--", *words],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environment,
            )

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def wait_lines(self, count: int) -> None:
        wait_for(
            lambda: len(self.lines) >= count or self.process.poll() is not None,
            f"{count} lines",
            SECONDS,
        )
        assert self.process.poll() is None, self.out.with_suffix(".err").read_text()

    def wait_more(self, count: int) -> None:
        """For so many lines more of a workload, or all that it says until it is hurried."""
        self.wait_lines(min(len(self.lines) + count, STEPS - LAST_STEPS + 1))

    def dump(self, image: Path, *options: str) -> dict[str, Any]:
        done = flowgpu("pause-and-dump", self.name, "--output", image, "--json", *options)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def hurry(self) -> None:
        self.hurrying.touch()

    def end(self, *, hurry: bool = True) -> int:
        """The exit code. What is restored hurries as well."""
        if hurry:
            self.hurry()
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """End it and its job, whether they are still there or not."""
        if any(job.name == self.name and job.state in LIVE_STATES for job in Registry().all()):
            flowgpu("kill", self.name)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    """Starts jobs; what still runs at the end is killed."""
    started: list[Run] = []

    def start(name: str, words: list[str], fault: str = "", *options: str) -> Run:
        started.append(Run(name, words, tmp_path, fault, *options))
        return started[-1]

    yield start
    for run in started:
        run.kill()


@functools.cache
def undisturbed(workload: str, steps: int = STEPS) -> list[str]:
    """Lines of a run that nobody disturbed."""
    words = command(workload, **{"steps": steps, "step-delay": 0})
    done = flowgpu("run", "--gpu", "emulated", "--", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# The driver saves pools and textures by itself, and replay makes them again.
LIVES = [
    *(("native", workload) for workload in WORKLOADS),
    *(("replay", workload) for workload in (*WORKLOADS, "stream_ordered", "textures", "nbody")),
]
# They hold much memory that is not in use.
SPARSE = ("modules", "small_allocs", "segments", "sharing")


@pytest.mark.parametrize(("engine", "workload"), LIVES)
def test_a_job_and_its_copies_end_as_an_undisturbed_one(
    engine: str, workload: str, runs: Any, tmp_path: Path
) -> None:
    """A job is left running, dumped, restored, dumped again and restored again; and so is the copy
    that was made of it first."""
    expected = undisturbed(workload)
    copy, image, again = (tmp_path / name for name in ("copy", "image", "again"))
    name = f"{engine}-{workload.replace('_', '-')}"
    run = runs(name, command(workload), "", "--engine", engine)
    run.wait_lines(8)
    verb = ("checkpoint",) if engine == "replay" else ("pause-and-dump", "--leave-running")
    done = flowgpu(*verb, name, "--output", copy, "--json")
    assert done.returncode == 0, done.stderr
    is_live(json.loads(done.stdout), copy, engine)
    run.wait_more(5)
    is_plain(run.dump(image), image, engine, workload)
    assert run.end(hurry=False) == 75
    assert run.lines == expected[: len(run.lines)]
    assert (image / "output.log").read_text().splitlines() == run.lines
    done = flowgpu("restore", image, "--detach", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["restore_seconds"] > 0
    done = flowgpu("pause-and-dump", name, "--output", again, "--json")
    assert done.returncode == 0, done.stderr
    is_plain(json.loads(done.stdout), again, engine, workload)
    run.hurry()
    # What was said between the two is in the log of the second image only.
    goes_on_from(again, workload)
    if engine == "native" and workload in SPARSE:
        assert Image(copy).chunk_table(0).count(Kind.INACTIVE) > 0
        goes_on_from(copy, workload, "--poison")
    else:
        goes_on_from(copy, workload)
    for path in (copy, image, again):
        Image(path).verify()


def is_live(report: dict[str, Any], image: Path, engine: str) -> None:
    """A job that replay leaves running is dumped with CUDA."""
    live = engine == "replay"
    assert (report["engine"], report["live"]) == (engine, live)
    assert Image(image).manifest.live == live
    if live:
        assert 0 < report["freeze_seconds"] < report["pause_seconds"]
        assert report["pause_seconds"] < report["stall_seconds"] < report["total_seconds"]
        assert 0 < report["drain_seconds"] < report["total_seconds"] - report["pause_seconds"]
        assert (report["rung"], report["rung_reason"]) == ("early-pages", "")


def is_plain(report: dict[str, Any], path: Path, engine: str, workload: str) -> None:
    image = Image(path)
    assert (report["engine"], report["live"]) == (engine, False)
    assert image.manifest.engine == engine
    assert 0 < report["gpu_bytes_active"] <= report["gpu_bytes_reserved"]
    assert report["gpu_bytes_stored"] == report["gpu_bytes_distinct"]
    assert 0 < report["gpu_bytes_distinct"] <= report["gpu_bytes_nonzero"]
    assert report["gpu_bytes_nonzero"] <= report["gpu_bytes_active"]
    assert image.manifest.reductions == ("active", "zero", "dedup")
    if workload != "stream_ordered":  # the driver has a pool's memory, and the engine saves it
        blocks = [block.bytes for gpu in image.manifest.gpus for block in gpu.blocks]
        assert report["gpu_bytes_reserved"] == sum(blocks)


def goes_on_from(image: Path, workload: str, *options: str) -> None:
    """What is restored says what an undisturbed job says, from where the image's log ends."""
    restored = flowgpu("restore", image, *options)
    assert restored.returncode == 0, restored.stderr
    log = (image / "output.log").read_text().splitlines()
    assert log + restored.stdout.splitlines() == undisturbed(workload)


# Reads 1 MiB behind an allocation of 512 bytes, which is in the same block of 2 MiB.
STRAY = """
import os, time
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
address, data = int(ok(cu.cuMemAlloc(512))), bytearray(8)
left = 5
while left:
    ok(cu.cuMemcpyDtoH(data, address + (1 << 20), len(data)))
    print(data.hex(), flush=True)
    left -= os.path.exists(os.environ["WORKLOAD_HURRY"])
    time.sleep(0.02)
"""


def test_poison_shows_a_program_that_reads_what_it_was_not_given(runs: Any, tmp_path: Path) -> None:
    run = runs("stray", [sys.executable, "-c", STRAY])
    run.wait_lines(10)
    run.dump(tmp_path / "image")
    run.end()
    assert set(run.lines) == {16 * "0"}
    plain = flowgpu("restore", tmp_path / "image")
    assert plain.returncode == 0 and set(plain.stdout.splitlines()) == {16 * "0"}
    poisoned = flowgpu("restore", tmp_path / "image", "--poison")
    assert poisoned.returncode == 0 and set(poisoned.stdout.splitlines()) == {8 * "f1"}


# 6 MiB of which every other 32 bytes are zero.
FILLED = """
import os, time
import numpy as np
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
data = np.random.default_rng(3).integers(0, 256, (6 << 14, 64), np.uint8)
data[:, 32:] = 0
address = int(ok(cu.cuMemAlloc(data.nbytes)))
ok(cu.cuMemcpyHtoD(address, data, data.nbytes))
step, left = 0, 5
while left:
    back = np.empty_like(data)
    ok(cu.cuMemcpyDtoH(back, address, data.nbytes))
    print(step, np.array_equal(back, data), flush=True)
    step, left = step + 1, left - os.path.exists(os.environ["WORKLOAD_HURRY"])
    time.sleep(0.02)
"""


def test_packed_gpu_data_comes_back(runs: Any, tmp_path: Path) -> None:
    path = tmp_path / "image"
    run = runs("filled", [sys.executable, "-c", FILLED])
    run.wait_lines(10)
    result = run.dump(path, "--compress")
    assert run.end() == 75
    assert result["gpu_bytes_stored"] == 6 << 20
    image = Image(path)
    assert [entry.plain for entry in image.manifest.packed][-1] == "gpu0.data"
    assert len(image.frames(0) or ()) == 2
    assert image.extent_data(0).stat().st_size < 4 << 20
    image.verify()
    restored = flowgpu("restore", path, "--json")
    assert restored.returncode == 0, restored.stderr
    assert len(restored.stdout.splitlines()) >= 5
    lines = run.lines + restored.stdout.splitlines()
    assert lines == [f"{step} True" for step in range(len(lines))]
    data = bytearray(image.extent_data(0).read_bytes())
    data[-100] ^= 1
    image.extent_data(0).write_bytes(data)
    failed = flowgpu("restore", path)
    assert failed.returncode == ImageDamaged.exit_code
    assert "frame 1 of" in failed.stderr and "gpu0.data.zst" in failed.stderr


FAULTS = {
    "native": (
        *("gate", "handover", "strip", "ghost_checkpoint", "criu_dump", "commit"),
        *("ghost_death", "ghost_import", "ghost_dump"),
    ),
    "replay": ("strip", "criu_dump", "ghost_import", "commit"),
}


def lives_through(
    faults: Sequence[str], workload: str, runs: Any, folder: Path, *options: str
) -> list[str]:
    """What a job says of which every checkpoint fails at another of `faults`."""
    setting, image = folder / "fault", folder / "image"
    setting.touch()
    run = runs(f"faults-{workload}", command(workload), f"@{setting}", *options)
    for fault in faults:
        run.wait_more(2)
        setting.write_text(f"{fault}:1")
        done = flowgpu("pause-and-dump", run.name, "--output", image, *options)
        assert done.returncode == 73, (fault, done.returncode, done.stderr)
        assert not list(folder.glob("image*")), fault
    assert run.end() == 0
    return list(run.lines)


@pytest.mark.parametrize(
    ("engine", "workload"),
    [
        *(("native", workload) for workload in ("modules", "segments")),
        *(("replay", workload) for workload in ("segments", "stream_ordered", "textures")),
    ],
)
def test_failed_checkpoints_change_nothing(
    engine: str, workload: str, runs: Any, tmp_path: Path
) -> None:
    """One job lives through all faults."""
    faults = FAULTS[engine]
    said = lives_through(faults, workload, runs, tmp_path, "--engine", engine)
    assert said == undisturbed(workload)


# A task is asked the fourth time in PREPARE, and so on; the seventh time is one more ROOM.
ASKED = {4: "PREPARE", 5: "GATE", 6: "HANDOVER", 8: "STRIP", 9: "MAPBACK", 10: "OPEN"}
LOST = [(fault, nth) for fault in ("task_request", "task_reply") for nth in ASKED]


@pytest.mark.parametrize(("fault", "nth"), [*LOST, ("task_release", 1), ("task_release", 3)])
def test_a_task_that_fails_in_the_middle_runs_on(
    fault: str, nth: int, runs: Any, tmp_path: Path
) -> None:
    words = command("small_allocs", steps=FEW_STEPS)
    run = runs(f"{fault}-{nth}".replace("_", "-"), words, f"{fault}:{nth}")
    run.wait_lines(3)
    words = ["--output", tmp_path / "image", "--leave-running"]
    done = flowgpu("pause-and-dump", run.name, *words)
    phase = "HANDOVER" if fault == "task_release" else ASKED[nth]
    if phase not in ("MAPBACK", "OPEN"):
        assert done.returncode == 73, (done.returncode, done.stderr)
        assert f"in phase {phase}" in done.stderr
        assert not list(tmp_path.glob("image*"))
    else:  # the way back is gone twice
        assert done.returncode == 0, done.stderr
    assert run.end() == 0
    assert run.lines == undisturbed("small_allocs", FEW_STEPS)


# A job with a thread that writes into a file, whatever CUDA does.
BEATING = """
import os, sys, threading, time
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
memory = cu.cuMemAlloc(8 << 20)[1]
cu.cuMemsetD32(memory, 7, 2 << 20)
beats = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
def beat():
    count = 0
    while True:
        count += 1
        os.pwrite(beats, b"%12d" % count, 0)
        time.sleep(0.0002)
threading.Thread(target=beat, daemon=True).start()
while True:
    print(int(cu.cuMemsetD32(memory, 7, 16)[0]), flush=True)
    time.sleep(0.01)
"""


def test_no_thread_of_a_job_runs_before_its_memory_is_checked(runs: Any, tmp_path: Path) -> None:
    beats, image = tmp_path / "beats", tmp_path / "image"
    run = runs("beating", [sys.executable, "-c", BEATING, str(beats)])
    run.wait_lines(10)
    run.dump(image)
    assert run.end() == 75
    before = beats.read_bytes()
    data = bytearray((image / "gpu0.data").read_bytes())
    data[-1] ^= 1  # what is read last
    (image / "gpu0.data").write_bytes(data)
    for _ in range(3):
        assert flowgpu("restore", image, "--detach").returncode == 74
        assert beats.read_bytes() == before
    data[-1] ^= 1
    (image / "gpu0.data").write_bytes(data)
    assert flowgpu("restore", image, "--detach").returncode == 0
    wait_for(lambda: beats.read_bytes() > before, "a beat", SECONDS)


def test_too_little_disk_is_found_before_the_pause(runs: Any, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
    try:
        run = runs("no-disk", command("modules"))
        run.wait_lines(5)
        done = flowgpu("pause-and-dump", run.name, "--output", small / "image")
        assert done.returncode == NotEnoughDisk.exit_code, done.stderr
        log = Registry().dir(Registry().find(run.name).id).coordinator_log.read_text()
        assert "checkpoint: prepare failed" in log and "checkpoint: gate" not in log
        assert not list(small.iterdir())
        assert run.end() == 0
        assert run.lines == undisturbed("modules")
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("mode", ["", "recopy"])
def test_what_is_reserved_and_not_written_needs_no_disk(
    mode: str, runs: Any, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "none", small], check=True)
    try:
        run = runs("reserves", reserving(), "", "--engine", "replay")
        run.wait_lines(5)
        words = ["--mode", mode] if mode else []
        done = flowgpu("pause-and-dump", run.name, "--output", small / "image", "--json", *words)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["gpu_bytes_reserved"] >= RESERVED > 100 * report["gpu_bytes_stored"]
        assert run.end() == 75
        restored = flowgpu("restore", small / "image")
        assert restored.returncode == 0, restored.stderr
        assert run.lines + restored.stdout.splitlines() == undisturbed("nbody")
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_flipped_gpu_data_is_refused_and_nothing_runs(runs: Any, tmp_path: Path) -> None:
    run = runs("flipped", command("modules"))
    run.wait_lines(10)
    run.dump(tmp_path / "image")
    run.end()
    with open(tmp_path / "image" / "gpu0.data", "r+b") as file:
        file.seek(1 << 10)
        byte = file.read(1)
        file.seek(1 << 10)
        file.write(bytes([byte[0] ^ 1]))
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 74, restored.stderr
    assert restored.stdout == ""
    pids = Image(tmp_path / "image").manifest.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
