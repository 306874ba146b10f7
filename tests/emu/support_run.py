"""Cases of docs/reference/support.md in one process.

    python -m tests.emu.support_run GO CASE...

Says `ready` when all have got to their checkpoint, waits for the file GO, and lets each go on. With
`-` for GO it says what the driver answers to those that do not get there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cuda.bindings import driver as cu

from tests.emu.driver_lib import ok
from tests.emu.support_rows import CASES


def answers(names: list[str]) -> None:
    for name in names:
        try:
            next(CASES[name].body(print))
            print(name, "ready", flush=True)
        except AssertionError as error:  # of driver_lib.ok
            print(name, error.args[0].name, flush=True)


def main() -> None:
    go, names = Path(sys.argv[1]), sys.argv[2:]
    if str(go) == "-":
        answers(names)
        return
    waiting = []
    for name in names:

        def say(*what: object, name: str = name) -> None:
            print(f"{name}:", *what, flush=True)

        body = CASES[name].body(say)
        next(body)
        waiting.append((body, ok(cu.cuCtxGetCurrent())))
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.01)
    for body, context in waiting:
        ok(cu.cuCtxSetCurrent(context))
        for _ in body:
            raise RuntimeError("a case has one checkpoint")
    print("done", flush=True)


if __name__ == "__main__":
    main()
