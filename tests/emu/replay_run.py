"""Round trips of driver calls (replay_cases.py) in processes of their own, with one checkpoint.

    python -m tests.emu.replay_run GO CASE...

Says `ready` when all have got to their checkpoint, waits for the file GO, lets each go on, and says
one line a case: what it has answered to its questions, and which functions of the driver it has
called with success.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from tests.emu import driver_lib
from tests.emu.intercept_task import run
from tests.emu.replay_cases import PRELUDE, Case
from tests.emu.replay_cases_arrays import ARRAY_CASES
from tests.emu.replay_cases_code import CODE_CASES
from tests.emu.replay_cases_contexts import CONTEXT_CASES
from tests.emu.replay_cases_graphs import GRAPH_CASES
from tests.emu.replay_cases_memory import MEMORY_CASES
from tests.emu.replay_cases_streams import STREAM_CASES
from tests.emu.replay_cases_tables import TABLE_CASES
from tests.emu.replay_cases_variables import VARIABLE_CASES

CASES = (
    *(*CONTEXT_CASES, *STREAM_CASES, *CODE_CASES, *MEMORY_CASES, *VARIABLE_CASES),
    *(*GRAPH_CASES, *ARRAY_CASES, *TABLE_CASES),
)


def note_calls(noted: set[str]) -> None:
    """From now on, of this process: what it calls by the bindings with success, or by ctypes."""

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*values: Any) -> Any:
            result = call(*values)
            if result[0] == cu.CUresult.CUDA_SUCCESS:
                noted.add(name)
            return result

        return noted_call

    for name in dir(cu):
        if name.startswith("cu") and name[2].isupper():
            setattr(cu, name, noting(name, getattr(cu, name)))
    find = ctypes.CDLL.__getattr__

    def noted_find(library: ctypes.CDLL, name: str) -> Any:
        noted.add(name)
        return find(library, name)

    ctypes.CDLL.__getattr__ = noted_find  # type: ignore[method-assign]


def go_through(case: Case, parent: Connection) -> None:
    names, called = dict(vars(driver_lib)), set[str]()
    run("start()", names)
    run(PRELUDE, names)
    note_calls(called)

    def answers(asks: dict[str, Any]) -> dict[str, Any]:
        return {question: run(question, names) for question in asks}

    run(case.setup, names)
    said = {"before": answers(case.asks)}
    parent.send("ready")
    parent.recv()
    said |= {"after": answers(case.asks), "last": answers(case.last)}
    if "FLOWGPU_EMU_SOCKET" in os.environ:
        said["ended"] = answers(case.ended)
    parent.send(json.dumps({"case": case.name, "called": sorted(called)} | said, default=int))


def main() -> None:
    go, names = Path(sys.argv[1]), sys.argv[2:]
    fork = multiprocessing.get_context("fork")
    waiting = []
    for case in CASES:
        if case.name not in names:
            continue
        ours, theirs = fork.Pipe()
        process = fork.Process(target=go_through, args=(case, theirs), name=case.name, daemon=True)
        process.start()
        theirs.close()  # so that one that fails is noticed
        waiting.append(ours)
    for ours in waiting:
        ours.recv()
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.01)
    for ours in waiting:
        ours.send("go")
        print(ours.recv(), flush=True)


if __name__ == "__main__":
    main()
