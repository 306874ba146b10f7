"""NCCL communicators are counted on their way to a library of that name, made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import launch
from tests.emu import intercept_lib as lib
from tests.emu.test_replay import Task

# A communicator's address says how it was made; what comes of each argument is part of it.
NCCL = """
#include <cstddef>
#include <cstdint>
struct Id { char bytes[128]; };
struct Config { size_t size; uint32_t magic, version, number; };
static void* made(uint64_t kind, uint64_t more) { return (void*)(kind << 32 | more); }
extern "C" {
int result = 0;
void* last = nullptr;
int ncclCommInitRank(void** out, int ranks, Id id, int rank) {
    if (result == 0 || result == 7)
        *out = made(1, ranks << 16 | id.bytes[0] << 8 | id.bytes[127] << 4 | rank);
    return result;
}
int ncclCommInitRankConfig(void** out, int ranks, Id id, int rank, Config* config) {
    result = 0;
    const int inner = ncclCommInitRank(out, ranks, id, rank); // as one that is made of another
    *out = made(2, config->number);
    return inner;
}
int ncclCommInitRankScalable(void** out, int ranks, int rank, int ids, Id* id, Config* config) {
    *out = made(3, ranks << 16 | rank << 12 | ids << 8 | id->bytes[1] << 4 | config->number);
    return 0;
}
int ncclCommInitAll(void** out, int devices, const int* list) {
    for (int i = 0; i < devices; i++)
        out[i] = made(4, list ? list[i] : i);
    return 0;
}
int ncclCommSplit(void* from, int color, int key, void** out, Config* config) {
    const uint64_t more = (uint64_t)from << 12 | color << 8 | key << 4 | config->number;
    *out = color < 0 ? nullptr : made(5, more);
    return 0;
}
int ncclCommShrink(void* from, int* left_out, int count, void** out, Config* config, int flags) {
    const uint64_t more = (uint64_t)from << 16 | left_out[1] << 12 | count << 8;
    *out = made(6, more | config->number << 4 | flags);
    return 0;
}
int ncclCommCount(void*, int* out) { *out = 2; return 0; }
int ncclCommUserRank(void*, int* out) { *out = 1; return 0; }
int ncclCommDestroy(void* one) { last = one; return result; }
int ncclCommAbort(void* one) { last = one; return result; }
}
"""
# This library is linked with NCCL, as PyTorch's is; the program opens it for itself alone.
USER = """
struct Id { char bytes[128]; };
extern "C" {
extern int result;
extern void* last;
int ncclCommInitRank(void**, int, Id, int);
int ncclCommInitRankConfig(void**, int, Id, int, void*);
int ncclCommInitRankScalable(void**, int, int, int, Id*, void*);
int ncclCommInitAll(void**, int, const int*);
int ncclCommSplit(void*, int, int, void**, void*);
int ncclCommShrink(void*, int*, int, void**, void*, int);
int ncclCommDestroy(void*);
int ncclCommAbort(void*);
static Id id = {{3, 5}};
static void* one;
static void* parent;
static void* all[3];
static struct { unsigned long size; unsigned magic, version, number; } config;
static void* config_of(unsigned number) {
    config = {sizeof config, 0, 0, number};
    return &config;
}
void will(int answer) { result = answer; }
void* ended() { return last; }
int rank() { one = nullptr; id.bytes[127] = 7; return ncclCommInitRank(&one, 2, id, 1); }
int rank_config() { return ncclCommInitRankConfig(&one, 2, id, 1, config_of(9)); }
int rank_scalable() { return ncclCommInitRankScalable(&one, 4, 3, 1, &id, config_of(2)); }
int every() {
    const int list[] = {6, 7, 8}, answer = ncclCommInitAll(all, 3, list);
    one = all[2];
    return answer;
}
void born_of(void* which) { parent = which; }
int split(int color) { return ncclCommSplit(parent, color, 2, &one, config_of(3)); }
int shrink() { int out[] = {1, 4}; return ncclCommShrink(parent, out, 2, &one, config_of(3), 1); }
void* made() { return one; }
int destroy(void* which) { return ncclCommDestroy(which); }
int abort_it(void* which) { return ncclCommAbort(which); }
}
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nccl")
    nccl, path = folder / "libnccl.so.2", folder / "libuser.so"
    build = ["g++", "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o"]
    subprocess.run([*build, nccl], input=NCCL, text=True, check=True)
    linked = [*build, path, "-x", "none", nccl, f"-Wl,-rpath,{folder}"]
    subprocess.run(linked, input=USER, text=True, check=True)
    return path


@pytest.fixture
def task(tmp_path: Path, user: Path) -> Iterator[Task]:
    with lib.job(tmp_path, replay=True) as (_, program, connection):
        task = Task(program, connection)
        task.do(f"""
import ctypes
user = ctypes.CDLL({str(user)!r})
user.made.restype = user.ended.restype = ctypes.c_void_p
stub = ctypes.CDLL(None)
""")
        yield task


def living(task: Task) -> object:
    return task.do("stub.flowgpu_nccl_communicators()")


PARENT = 1 << 32 | 2 << 16 | 3 << 8 | 7 << 4 | 1


@pytest.mark.parametrize(
    ("call", "made"),
    [
        ("rank()", [PARENT]),
        ("rank_config()", [2 << 32 | 9]),
        ("rank_scalable()", [3 << 32 | 4 << 16 | 3 << 12 | 1 << 8 | 5 << 4 | 2]),
        ("every()", [4 << 32 | 6, 4 << 32 | 7, 4 << 32 | 8]),
    ],
)
def test_calls_arrive_as_they_were_made_and_are_counted(
    task: Task, call: str, made: list[int]
) -> None:
    assert task.do(f"user.{call}") == 0
    assert task.do("user.made()") == made[-1]
    assert living(task) == len(made)
    for left, handle in reversed(list(enumerate(made))):
        how = "destroy" if left % 2 else "abort_it"
        assert task.do(f"user.{how}(ctypes.c_void_p({handle}))") == 0
        assert (task.do("user.ended()"), living(task)) == (handle, left)


@pytest.mark.parametrize(
    ("call", "made", "count"),
    [
        ("split(1)", 5 << 32 | PARENT << 12 | 1 << 8 | 2 << 4 | 3, 1),
        ("split(-1)", None, 0),
        ("shrink()", 6 << 32 | PARENT << 16 | 4 << 12 | 2 << 8 | 3 << 4 | 1, 1),
    ],
)
def test_children_are_counted_too(task: Task, call: str, made: int | None, count: int) -> None:
    task.do("user.rank(); user.born_of(ctypes.c_void_p(user.made()))")
    assert task.do(f"user.{call}") == 0
    assert task.do("user.made()") == made
    assert living(task) == 1 + count


def test_what_was_not_made_or_not_ended_does_not_count(task: Task) -> None:
    task.do("user.will(5)")
    assert (task.do("user.rank()"), living(task)) == (5, 0)
    task.do("user.will(7)")  # goes on in the background
    assert (task.do("user.rank()"), living(task)) == (7, 1)
    task.do("user.will(4)")
    destroy = f"user.destroy(ctypes.c_void_p({PARENT}))"
    assert (task.do(destroy), living(task)) == (4, 1)
    task.do("user.will(0)")
    for _ in range(2):  # never fewer than none
        assert (task.do(destroy), living(task)) == (0, 0)


def test_who_looks_the_functions_up_is_counted_too(task: Task, user: Path) -> None:
    """JAX looks them up by dlsym on the library that it has opened."""
    assert task.do(f"""
import _ctypes
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]
nccl = ctypes.CDLL({str(user.with_name("libnccl.so.2"))!r})
one, ident = ctypes.c_void_p(), Id()
ident.bytes[127] = 7
[nccl.ncclCommInitRank(ctypes.byref(one), 2, ident, 1), one.value]
""") == [0, 1 << 32 | 2 << 16 | 7 << 4 | 1]
    assert living(task) == 1
    # Another copy of NCCL keeps its own functions: ours lead to one only.
    other = user.with_name("libnccl-copy.so")
    shutil.copy(user.with_name("libnccl.so.2"), other)
    assert task.do(f"""
copy = ctypes.CDLL({str(other)!r})
[ctypes.cast(f, ctypes.c_void_p).value == _ctypes.dlsym(library._handle, name)
 for library in (nccl, copy) for name, f in
 (("ncclCommDestroy", stub.ncclCommDestroy), ("ncclCommInitRank", stub.ncclCommInitRank))]
""") == [True, True, False, False]
    assert task.do("nccl.ncclCommAbort(one)") == 0
    assert living(task) == 0


def test_the_coordinator_sees_what_is_issued(task: Task) -> None:
    assert task.connection.nccl
    assert task.do("user.rank()") == 0
    (end,) = task.connection.nccl.view().ends
    assert (end.rank, end.ranks, end.entered, end.made) == (1, 2, 1, True)
    assert task.connection.nccl.header().living == 1
    task.do("user.destroy(ctypes.c_void_p(user.made()))")
    assert task.connection.nccl.view().ends == []
    task.checkpoint()


def test_a_child_of_a_fork_has_none_and_changes_nothing_of_its_parents(task: Task) -> None:
    task.do("user.rank()")
    assert task.do("""
import os
there, back = os.pipe()
child = os.fork()
if child == 0:
    seen = stub.flowgpu_nccl_communicators()
    user.rank()
    os.write(back, bytes([seen, stub.flowgpu_nccl_communicators()]))
    os._exit(0)
os.waitpid(child, 0)
list(os.read(there, 2))
""") == [0, 1]
    assert task.connection.nccl
    assert (living(task), task.connection.nccl.header().living) == (1, 1)
    assert len(task.connection.nccl.view().ends) == 1


def test_without_nccl_its_functions_fail() -> None:
    script = "import ctypes; print(ctypes.CDLL(None).ncclCommDestroy(ctypes.c_void_p(1)))"
    env = {**os.environ, "LD_PRELOAD": str(launch.nccl_counts())}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr) == ("2\n", "")
