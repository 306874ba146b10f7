"""A profiler that records is known on its way to a library of CUPTI's name, made here, and what it
will have lost is told with the checkpoint that is made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import launch
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.gpu_job import GPU, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import runtime_dir
from tests.emu.test_replay import Task

__all__ = ["runtime_dir"]

CUPTI = """
#include <stddef.h>
int kind_of_last, result;
int cuptiActivityEnable(int kind) { kind_of_last = kind; return result; }
int cuptiActivityDisable(int kind) { kind_of_last = -kind; return result; }
int cuptiActivityEnableContext(void* context, int kind) {
    kind_of_last = context ? kind : 0;
    return result;
}
int cuptiActivityDisableContext(void* context, int kind) {
    kind_of_last = context ? -kind : 0;
    return result;
}
int cuptiFinalize(void) { return result; }
"""
USER = """
int cuptiActivityEnable(int), cuptiActivityDisable(int), cuptiFinalize(void);
int begin(int kind) { return cuptiActivityEnable(kind); }
int end(int kind) { return cuptiActivityDisable(kind); }
int finalize(void) { return cuptiFinalize(); }
"""
LOST = "what a profiler (CUPTI) had not read yet"


def _library(folder: Path, name: str, source: str, *options: str) -> Path:
    code, made = folder / f"{name}.c", folder / name
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, code, *options], check=True)
    return made


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cupti")
    cupti = _library(folder, "libcupti.so.13", CUPTI, "-Wl,-soname,libcupti.so.13")
    return cupti, _library(folder, "user.so", USER, str(cupti), f"-Wl,-rpath,{folder}")


@pytest.fixture
def task(tmp_path: Path, libraries: tuple[Path, Path]) -> Iterator[Task]:
    cupti, user = libraries
    with lib.job(tmp_path, replay=True) as (_, program, connection):
        task = Task(program, connection)
        task.do(f"""
user, cupti = ctypes.CDLL({str(user)!r}), ctypes.CDLL({str(cupti)!r})
last = ctypes.c_int.in_dll(cupti, "kind_of_last")
result = ctypes.c_int.in_dll(cupti, "result")
""")
        yield task


def lost(task: Task, engine: Engine = Engine.REPLAY) -> str:
    reply = task.connection.gate(engine=engine)
    assert reply.status == Status.OK
    task.connection.ok(Message.OPEN)
    return reply.detail


def test_a_profiler_that_records_is_told(task: Task) -> None:
    assert lost(task) == ""
    assert task.do("[user.begin(3), user.begin(10), last.value]") == [0, 0, 10]
    assert lost(task) == lost(task, Engine.NATIVE) == LOST
    assert task.do("[user.end(3), last.value]") == [0, -3]
    assert lost(task) == LOST
    task.do("user.end(10)")
    assert lost(task) == ""
    task.do("user.begin(8); user.finalize()")
    assert lost(task) == ""


def test_who_looks_the_functions_up_is_told_too(task: Task) -> None:
    context = "ctypes.c_void_p(7)"
    assert task.do(f"[cupti.cuptiActivityEnableContext({context}, 5), last.value]") == [0, 5]
    assert lost(task) == LOST
    assert task.do(f"[cupti.cuptiActivityDisableContext({context}, 5), last.value]") == [0, -5]
    assert lost(task) == ""


def test_what_cupti_refuses_records_nothing(task: Task) -> None:
    assert task.do("result.value = 4; user.begin(3)") == 4
    assert lost(task) == ""


PROFILED = (
    GPU
    + """
user = ctypes.CDLL(sys.argv[2])
assert user.begin(3) == 0
went()
print("gpu", gpu())
"""
)


def test_the_report_of_a_dump_names_the_process_that_is_profiled(
    libraries: tuple[Path, Path], tmp_path: Path
) -> None:
    done, said = said_with_a_checkpoint_between(
        "profiled", "auto", PROFILED, tmp_path, libraries[1], "--leave-running", "--json"
    )
    assert done.returncode == 0, done.stderr
    (words,) = json.loads(done.stdout)["not_kept"]
    assert re.fullmatch(rf"process \d+: {re.escape(LOST)}", words)
    assert said == ["ready", "gpu True"]


def test_without_cupti_its_functions_say_that_it_is_not_there() -> None:
    script = "import ctypes; print(ctypes.CDLL(None).cuptiActivityEnable(3))"
    env = {**os.environ, "LD_PRELOAD": str(launch.memory_stub())}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr) == ("15\n", "")
