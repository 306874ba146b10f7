"""The gate: what waits there, what it costs. The driver is a stub that only counts."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.launch import intercept_library
from flowgpu.wire import GateState, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import Connection, Coordinator
from tests.patience import SECONDS

FIELDS = ("inside", "launches", "calls", "signals", "errors", "stop")
CALLS = 2_000_000
NS_PER_CALL = 20.0
CLOSINGS = 200


class Stats:
    """programs/stats.h"""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self.mapping = mmap.mmap(file.fileno(), 4096)

    def __getattr__(self, name: str) -> int:
        return struct.unpack_from("=Q", self.mapping, 8 * FIELDS.index(name))[0]

    def stop_program(self) -> None:
        struct.pack_into("=Q", self.mapping, 8 * FIELDS.index("stop"), 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub driver and the program."""
    folder = tmp_path_factory.mktemp("gate")
    stub = lib.compile_program(
        "stub_driver.c", folder / "libcuda.so.1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"
    )
    lib.compile_program("gate.c", folder / "gate", str(stub))
    return folder


@pytest.fixture
def stats(tmp_path: Path) -> Iterator[Stats]:
    made = Stats(tmp_path / "stats")
    yield made
    made.stop_program()


def stub_environment(built: Path, folder: Path, preload: bool) -> dict[str, str]:
    environment = dict(os.environ) | {"STUB_STATS": str(folder / "stats")}
    if not preload:
        return environment | {"LD_LIBRARY_PATH": str(built)}
    return environment | {
        "LD_PRELOAD": str(intercept_library()),
        "FLOWGPU_REAL_LIBCUDA": str(built / "libcuda.so.1"),
        "FLOWGPU_SOCKET": str(folder / "task.sock"),
    }


@contextlib.contextmanager
def hammer(
    built: Path, folder: Path, stats: Stats, threads: int
) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """The program, launching by then, and its connection."""
    with (
        Coordinator(folder / "task.sock") as coordinator,
        subprocess.Popen(
            [built / "gate", "launch", str(threads)], env=stub_environment(built, folder, True)
        ) as process,
    ):
        try:
            task = coordinator.accept()
            lib.wait_until(lambda: stats.launches > 1000, "work")
            yield task, process
        finally:
            if process.poll() is None:
                process.kill()


def test_nothing_is_lost_while_the_gate_closes_and_opens(
    built: Path, tmp_path: Path, stats: Stats
) -> None:
    with hammer(built, tmp_path, stats, 8) as (task, process):

        def all_have_begun() -> bool:
            """A thread is counted from its first call on."""
            task.close_gate()
            task.ok(Message.OPEN)
            return bool(task.page.threads == 9)

        lib.wait_until(all_have_begun, "the first calls of all threads")
        for _ in range(CLOSINGS):
            task.close_gate()
            before = stats.launches
            assert (stats.inside, task.page.threads) == (0, 9)  # and the main thread
            time.sleep(0.001)
            assert (stats.launches, stats.inside) == (before, 0), "work went through the gate"
            task.ok(Message.OPEN)
            lib.wait_until(lambda before=before: stats.launches > before, "work")
        stats.stop_program()
        assert process.wait(SECONDS) == 0
    assert stats.calls == stats.launches
    assert stats.errors == 0  # no call failed, and errno was kept


def test_signals_are_handled_while_a_thread_waits_at_the_gate(
    built: Path, tmp_path: Path, stats: Stats
) -> None:
    with hammer(built, tmp_path, stats, 1) as (task, process):
        task.close_gate()
        launches, signals = stats.launches, stats.signals
        lib.wait_until(lambda: stats.signals > signals + 10, "signal handling")
        assert stats.launches == launches
        task.ok(Message.OPEN)
        lib.wait_until(lambda: stats.launches > launches, "work")
        stats.stop_program()
        assert process.wait(SECONDS) == 0
    assert stats.errors == 0 and stats.calls == stats.launches


def test_a_call_from_within_the_driver_does_not_wait_and_its_end_is_not_the_end(
    built: Path, tmp_path: Path, stats: Stats
) -> None:
    with (
        Coordinator(tmp_path / "task.sock") as coordinator,
        subprocess.Popen(
            [built / "gate", "nested"],
            env=stub_environment(built, tmp_path, True),
            stdin=subprocess.PIPE,
        ) as process,
    ):
        task = coordinator.accept()
        lib.wait_until(lambda: stats.launches > 10, "calls from within")
        reply = task.gate(timeout_ms=200)
        assert (reply.status, reply.detail) == (
            Status.BUSY,
            "a thread did not leave the driver in time",
        )
        before = stats.launches
        lib.wait_until(lambda: stats.launches > before, "calls from within")
        stats.stop_program()
        lib.wait_until(lambda: stats.calls == 1, "the outer call's end")
        task.close_gate()
        task.ok(Message.OPEN)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


def test_a_gated_call_costs_next_to_nothing(built: Path, tmp_path: Path, stats: Stats) -> None:
    bare, gated = (
        float(
            subprocess.run(
                [built / "gate", "cost", str(CALLS)],
                env=stub_environment(built, tmp_path, preload),
                capture_output=True,
                text=True,
                check=True,
                timeout=SECONDS,
            ).stdout
        )
        for preload in (False, True)
    )
    print(f"{bare:.2f} ns a call bare, {gated:.2f} ns gated")
    assert gated - bare < NS_PER_CALL


def test_a_capture_makes_the_task_busy_until_it_ends(
    built: Path, tmp_path: Path, stats: Stats
) -> None:
    with (
        Coordinator(tmp_path / "task.sock") as coordinator,
        subprocess.Popen(
            [built / "gate", "capture"],
            env=stub_environment(built, tmp_path, True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):

        def call(what: str) -> int:
            assert process.stdin and process.stdout
            process.stdin.write(what + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        task = coordinator.accept()
        assert call("b0") != 0 and call("e0") != 0  # neither begins nor ends one
        task.close_gate()
        task.ok(Message.OPEN)
        for nested in (1, 2):
            assert [call("b1") for _ in range(nested)] == [0] * nested
            for _ in range(nested):
                reply = task.gate()
                assert (reply.status, reply.detail) == (
                    Status.BUSY,
                    "a CUDA graph is being captured",
                )
                assert task.page.gate == GateState.OPEN
                assert call("e0") != 0
                assert call("e1") == 0
            task.close_gate()
            task.ok(Message.OPEN)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
