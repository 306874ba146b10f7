"""Round trips of contexts, what is set of them, and what threads have current."""

from __future__ import annotations

from tests.emu.replay_cases import Case

_PREFER_L1 = "cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1"
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
    Case(
        "settings_of_a_context",
        ("cuCtxSetLimit", "cuCtxSetCacheConfig", "cuCtxSetFlags"),
        f"""
heap = cu.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE
ok(cu.cuCtxSetLimit(heap, 24 << 20))
ok(cu.cuCtxSetLimit(heap, 16 << 20))
ok(cu.cuCtxSetCacheConfig({_PREFER_L1}))
ok(cu.cuCtxSetFlags(2))
""",
        {
            "ok(cu.cuCtxGetLimit(heap))": 16 << 20,
            "int(ok(cu.cuCtxGetCacheConfig()))": 2,
            "ok(cu.cuCtxGetFlags()) & 7": 2,
        },
    ),
    Case(
        "peers",
        ("cuCtxEnablePeerAccess", "cuCtxDisablePeerAccess"),
        """
far = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(1))))
farther = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(2))))
ok(cu.cuCtxEnablePeerAccess(far, 0))
ok(cu.cuCtxEnablePeerAccess(farther, 0))
ok(cu.cuCtxDisablePeerAccess(farther))
""",
        {
            "name(cu.cuCtxEnablePeerAccess(far, 0))": "PEER_ACCESS_ALREADY_ENABLED",
            "name(cu.cuCtxDisablePeerAccess(farther))": "PEER_ACCESS_NOT_ENABLED",
        },
        {"name(cu.cuCtxDisablePeerAccess(far))": "CUDA_SUCCESS"},
        devices=3,
    ),
    Case(
        "peers_that_have_ended",
        ("cuCtxEnablePeerAccess", "cuCtxDestroy", "cuDevicePrimaryCtxRelease"),
        """
devices = [ok(cu.cuDeviceGet(number)) for number in (1, 2)]
ended = ok(cu.cuCtxCreate(None, 0, devices[0]))
inactive = ok(cu.cuDevicePrimaryCtxRetain(devices[1]))
ok(cu.cuCtxSetCurrent(primary))
for peer in (ended, inactive):
    ok(cu.cuCtxEnablePeerAccess(peer, 0))
ok(cu.cuCtxDestroy(ended))
ok(cu.cuDevicePrimaryCtxRelease(devices[1]))
""",
        {"value_of(ok(cu.cuMemAlloc(4096))) >= 0": True},
        devices=3,
    ),
    Case(
        "primary_contexts",
        (
            "cuDevicePrimaryCtxRetain",
            "cuDevicePrimaryCtxRelease",
            "cuDevicePrimaryCtxReset",
            "cuDevicePrimaryCtxSetFlags",
        ),
        """
second, third = ok(cu.cuDeviceGet(1)), ok(cu.cuDeviceGet(2))
ok(cu.cuDevicePrimaryCtxSetFlags(second, 4))
for _ in range(3):
    twice = ok(cu.cuDevicePrimaryCtxRetain(second))
ok(cu.cuDevicePrimaryCtxRelease(second))
ok(cu.cuDevicePrimaryCtxRetain(third))
ok(cu.cuDevicePrimaryCtxReset(third))
""",
        {
            "ok(cu.cuDevicePrimaryCtxGetState(device))[1]": 1,
            "list(ok(cu.cuDevicePrimaryCtxGetState(second)))": [4, 1],
            "ok(cu.cuDevicePrimaryCtxGetState(third))[1]": 0,
            "same(ok(cu.cuDevicePrimaryCtxRetain(second)), twice)": True,
            "name(cu.cuDevicePrimaryCtxRelease(second))": "CUDA_SUCCESS",
        },
        {
            "name(cu.cuDevicePrimaryCtxRelease(second))": "CUDA_SUCCESS",
            "ok(cu.cuDevicePrimaryCtxGetState(second))[1]": 1,
            "name(cu.cuDevicePrimaryCtxRelease(cu.CUdevice(1)))": "CUDA_SUCCESS",
            "list(ok(cu.cuDevicePrimaryCtxGetState(second)))[1]": 0,
        },
        devices=3,
    ),
)
