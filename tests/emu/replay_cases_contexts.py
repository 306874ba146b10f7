"""Round trips of contexts, and of what threads have current (replay_cases.py)."""

from __future__ import annotations

from tests.emu.replay_cases import Case

_ENDED = [True, "CONTEXT_IS_DESTROYED", "CONTEXT_IS_DESTROYED"]

CONTEXT_CASES = (
    Case(
        "contexts",
        (
            *("cuCtxCreate", "cuCtxDestroy", "cuCtxSetCurrent", "cuCtxGetCurrent"),
            *("cuCtxPushCurrent", "cuCtxPopCurrent"),
        ),
        """
ended = ok(cu.cuCtxCreate(None, 0, device))
ok(cu.cuCtxDestroy(ended))
mine = ok(cu.cuCtxCreate(None, 4, device))
other = ok(cu.cuCtxCreate(None, 0, device))
ok(cu.cuCtxSetCurrent(mine))
ok(cu.cuCtxPushCurrent(other))
""",
        {
            "same(ok(cu.cuCtxGetCurrent()), other)": True,
            "same(ok(cu.cuCtxPopCurrent()), other)": True,
            "same(ok(cu.cuCtxGetCurrent()), mine)": True,
            "ok(cu.cuCtxGetFlags()) & 7": 4,
            "name(cu.cuCtxPushCurrent(other))": "CUDA_SUCCESS",
        },
        {
            "name(cu.cuCtxDestroy(other))": "CUDA_SUCCESS",
            "same(ok(cu.cuCtxGetCurrent()), mine)": True,
            "same(ok(cu.cuCtxPopCurrent()), mine)": True,
        },
        {
            "name(cu.cuCtxSetCurrent(ended)) != 'CUDA_SUCCESS'": True,
            "name(cu.cuCtxDestroy(ended)) != 'CUDA_SUCCESS'": True,
        },
    ),
    Case(
        "contexts_that_ended_and_are_current",
        ("cuCtxDestroy",),
        """
import queue, threading
mine, theirs = (ok(cu.cuCtxCreate(None, 0, device)) for _ in range(2))
asked, answers = queue.Queue(), queue.Queue()
def says(ended):
    is_current = same(ok(cu.cuCtxGetCurrent()), ended)
    return [is_current, name(cu.cuMemAlloc(4)), name(cu.cuEventCreate(0))]
def thread():
    ok(cu.cuCtxSetCurrent(theirs))
    answers.put("ready")
    while True:
        asked.get()
        answers.put(says(theirs))
threading.Thread(target=thread, daemon=True).start()
answers.get()
def thread_says():
    asked.put("once more")
    return answers.get()
ok(cu.cuCtxPushCurrent(mine))
ok(cu.cuCtxPushCurrent(mine))
ok(cu.cuCtxDestroy(theirs)); ok(cu.cuCtxDestroy(mine))
""",
        {"says(mine)": _ENDED, "thread_says()": _ENDED},
        {
            "same(ok(cu.cuCtxPopCurrent()), mine)": True,
            "says(theirs)": _ENDED,
        },
    ),
)
