"""What the programs share: their registry, a GPU state that moves on, the place of the dump."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from tests.emu.program_lib import HEAD

SAME, TOLD = "same", "told"
ENGINES = ("native", "replay")
RESTORED, LEFT = "restored", "left running"
MODES = (RESTORED, LEFT)
COUNT = 4096  # numbers in the GPU's memory
PTX = (
    HEAD
    + """
.visible .entry step(.param .u64 p, .param .u32 k) {
    .reg .b64 %rd<4>; .reg .b32 %r<9>;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [k];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4; mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r6, [%rd3];
    mad.lo.s32 %r7, %r6, 1664525, %r5; add.s32 %r8, %r7, %r1;
    st.global.u32 [%rd3], %r8; ret;
}
"""
).encode() + b"\0"

libc: Any = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Here:
    """Where a program runs: it goes on once `go` is there, and `folder` is its own."""

    go: Path
    folder: Path

    def ready(self) -> None:
        say("ready")
        self.wait()

    def wait(self) -> None:
        """Wait for the word to go on, as other processes of the program do."""
        while not self.go.exists():
            time.sleep(0.005)

    @property
    def unique(self) -> str:
        """A name that no other run has."""
        return f"trial-{hashlib.sha1(os.fsencode(self.folder)).hexdigest()[:10]}"

    @property
    def log(self) -> Path:
        """Where the machine's log daemon listens: short, as a path of a socket has to be."""
        return Path("/tmp") / f"{self.unique}.log"

    @property
    def port(self) -> int:
        """One of twenty that no other run is likely to have, below those that the kernel gives."""
        digest = hashlib.sha1(os.fsencode(self.folder)).digest()
        return 10000 + int.from_bytes(digest[:2], "big") % 1000 * 20

    def other(self, body: Callable[[Here], None]) -> list[str]:
        """The words that run another body, of the same file, in a process of its own."""
        return words(body.__module__.rpartition(".")[2], body.__name__, self.go, self.folder)


def words(module: str, name: str, go: Path, folder: Path) -> list[str]:
    """The command that runs a body."""
    return [sys.executable, "-m", "tests.trials.run", str(go), module, name, str(folder)]


Body = Callable[[Here], None]


@dataclass(frozen=True)
class Program:
    """`about`: a few words for the page. `expected` and `pending`: see `program`."""

    name: str
    module: str
    about: str
    body: Body
    expected: Mapping[str, str]
    pending: Mapping[str, str]
    why: str
    options: Sequence[str]

    def outcome(self, engine: str, mode: str) -> str:
        """What must become of it."""
        return _chosen(self.expected, engine, mode) or SAME

    def missing(self, engine: str, mode: str) -> str:
        """Why that is not so yet; empty if it is."""
        return _chosen(self.pending, engine, mode) or ""


def _chosen(by_case: Mapping[str, str], engine: str, mode: str) -> str | None:
    keys = (f"{engine} {mode}", mode, engine, "")
    return next((by_case[key] for key in keys if key in by_case), None)


PROGRAMS: dict[str, Program] = {}


def program(
    about: str,
    expected: str | Mapping[str, str] = SAME,
    *,
    why: str = "",
    pending: str | Mapping[str, str] = "",
    options: Sequence[str] = (),
) -> Callable[[Body], Body]:
    """Register a body.

    `expected`: the outcome (tests/trials/trial.py), for all or by engine, mode, or both. `why`: the
    reason of a refusal. `pending`: what is to be mended until it comes out so, in the same way.
    `options`: further words for the dump.
    """

    def register(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        PROGRAMS[name] = Program(
            name,
            body.__module__.rpartition(".")[2],
            about,
            body,
            _by_case(expected),
            _by_case(pending),
            why,
            options,
        )
        return body

    return register


def _by_case(given: str | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(given, str):
        return {"": given} if given else {}
    return given


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


@dataclass
class Gpu:
    """Memory on the GPU that each step changes by a kernel."""

    device: int = 0
    number: int = 0
    context: Any = field(init=False)
    memory: int = field(init=False)

    def __post_init__(self) -> None:
        ok(cu.cuInit(0))
        self.context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(self.device))))
        self.current()
        self.kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(PTX)), b"step"))
        self.memory = int(ok(cu.cuMemAlloc(4 * COUNT)))
        ok(cu.cuMemsetD8(self.memory, 1, 4 * COUNT))

    def current(self) -> None:
        """Make its context that of this thread."""
        ok(cu.cuCtxSetCurrent(self.context))

    def launch(self, memory: int, number: int) -> None:
        values = ((memory, number), (ctypes.c_uint64, ctypes.c_uint32))
        ok(cu.cuLaunchKernel(self.kernel, COUNT // 256, 1, 1, 256, 1, 1, 0, 0, values, 0))

    def step(self) -> str:
        """Go on by a step; a digest of the memory."""
        self.number += 1
        self.launch(self.memory, self.number)
        return self.digest()

    def digest(self, memory: int | None = None, size: int = 4 * COUNT) -> str:
        data = bytearray(size)
        ok(cu.cuMemcpyDtoH(data, self.memory if memory is None else memory, size))
        return hashlib.sha1(data).hexdigest()[:12]


def say(*what: object) -> None:
    """In one piece, whatever PYTHONUNBUFFERED says: who has read "ready" dumps a whole line."""
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Wait for it; False if it does not come."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(found)


def error() -> str:
    """What the last call of `libc` has failed with."""
    return os.strerror(ctypes.get_errno())


def build(here: Here, source: str, *options: str) -> Path:
    """Compile C; all runs of a program share what was built."""
    digest = hashlib.sha1("\0".join([source, *options]).encode()).hexdigest()[:16]
    output = here.folder.parent / digest
    if not output.exists():
        made = here.folder.parent / f"{digest}.{os.getpid()}"
        subprocess.run(
            ["cc", "-x", "c", "-O1", "-D_GNU_SOURCE", "-o", made, "-", *options],
            input=source.encode(),
            check=True,
            env={"PATH": os.environ["PATH"]},
        )
        made.rename(output)
    return output


def child(run: Callable[[], int | None]) -> int:
    """Fork; the child runs that and ends with what it gives. Gives the child's process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = run() or 0
    finally:
        os._exit(code)


def ended(pids: Sequence[int]) -> list[int]:
    """Exit codes of children, once they have ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
