"""Round trips of what programs have of the driver's private tables."""

from __future__ import annotations

from tests.emu.replay_cases import Case

# What the emulated driver's slot of a private table that nobody knows is called with.
UNKNOWN_SLOT = """
from tests.emu.driver_lib import slots
module = ok(cu.cuModuleLoadData(PTX))
kernel, stream = ok(cu.cuModuleGetFunction(module, b"inc")), ok(cu.cuStreamCreate(0))
event, context = ok(cu.cuEventCreate(0)), ok(cu.cuCtxGetCurrent())
handles = [ctypes.c_void_p(int(h)) for h in (context, stream, event, kernel, module)]
found = ctypes.c_double()
"""

TABLE_CASES = (
    Case(
        "private_tables",
        (),
        """
unknown = cu.CUuuid()
""",
        {"name(cu.cuGetExportTable(unknown))": "INVALID_VALUE"},
    ),
    Case(
        "functions_by_a_private_table",  # as cuFFT has them
        ("cuGetExportTable", "cuModuleLoadData"),
        """
from tests.emu.driver_lib import slots
module, seen = ok(cu.cuModuleLoadData(PTX)), []
note = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *given: seen.append(given))
each = slots("6e163fbeb958444d835ce182aff1991e", 8)[7]
context = ctypes.c_void_p(int(ok(cu.cuCtxGetCurrent())))
done = each(context, ctypes.c_void_p(int(module)), note, ctypes.c_void_p(5)) & 1
functions = {ok(cu.cuFuncGetName(cu.CUfunction(f))): cu.CUfunction(f) for _, f in seen}
""",
        {
            "done": 1,
            "list({given for given, _ in seen})": [5],
            "same(functions[b'inc'], ok(cu.cuModuleGetFunction(module, b'inc')))": True,
            "inc_of(functions[b'inc'])": 128,
        },
    ),
    Case(
        "storage_of_contexts",  # as cudart keeps its state
        ("cuGetExportTable", "cuCtxCreate"),
        """
from tests.emu.driver_lib import slots
put, delete, get = slots("c693336e1121df11a8c368f355d89593", 3)
key, gone = ctypes.c_void_p(4711), ctypes.c_void_p(4712)
other = ok(cu.cuCtxCreate(None, 0, 0))
ok(cu.cuCtxPopCurrent())
for where, value in ((None, 1), (ctypes.c_void_p(int(other)), 2)):
    assert put(where, key, ctypes.c_void_p(value), None) == 0
assert put(None, gone, ctypes.c_void_p(3), None) == 0 and delete(None, gone) == 0
def stored(where, key):
    found = ctypes.c_void_p()
    code = get(ctypes.byref(found), where, key)
    return found.value if code == 0 else -code
""",
        {
            "[stored(w, key) for w in (None, ctypes.c_void_p(int(other)))]": [1, 2],
            "stored(None, gone) < 0": True,
        },
        {"delete(None, key)": 0, "stored(None, key) < 0": True},
    ),
    Case(
        "contexts_in_private_tables",
        ("cuGetExportTable", "cuCtxCreate"),
        """
from tests.emu.driver_lib import slots
(*_, second) = slots("263e88607cd2614392f6bbd5006dfa7e", 3)
(*_, fourth) = slots("21318c60971432488ca641ff7324c8f2", 5)
other = ok(cu.cuCtxCreate(None, 0, 0))
ok(cu.cuCtxPopCurrent())
def used(context):
    return [slot(ctypes.c_void_p(int(context))) for slot in (second, fourth)]
""",
        {"used(primary)": [0, 0], "used(other)": [0, 0]},
        ended={"ok(cu.cuCtxDestroy(other)); 0 in used(other)": False},
        emulated_only=True,  # what a real driver answers is not known
    ),
    Case(
        "handles_in_a_slot_that_nobody_knows",
        ("cuGetExportTable",),
        UNKNOWN_SLOT
        + """
count = ok(cu.cuModuleGetFunctionCount(module))
def use():
    (*_, slot) = slots(b"an emulated slot".hex(), 2)
    result = slot(ctypes.byref(found), *handles, 40, ctypes.c_double(0.5))
    return result, found.value - count
""",
        {"use()": [0, 40.5]},
        ended={"ok(cu.cuModuleUnload(module)); use()[0] != 0": True},
        emulated_only=True,
    ),
    Case(
        "a_slot_that_nobody_knows_sets_the_context",
        ("cuGetExportTable", "cuCtxCreate"),
        UNKNOWN_SLOT
        + """
other = ok(cu.cuCtxCreate(None, 0, 0))
def current():
    device = ctypes.c_int(-1)
    code = libcuda().cuCtxGetDevice_v2(ctypes.byref(device), None)
    now, known = ok(cu.cuCtxGetCurrent()), (("first", context), ("other", other))
    return [n for n, c in known if same(now, c)], code, device.value
def after():
    _, use, change = slots(b"an emulated slot".hex(), 3)
    seen = []
    for number in (0, 0, 1, 1, 0, 1):
        code = change(ctypes.c_void_p(int((context, other)[number])))
        seen.append((code, current() == current()))
        seen.append(current()[0][0])
        seen.append(use(ctypes.byref(found), *handles, 40, ctypes.c_double(0.5)))
        seen.append(current() == (seen[-2:-1], 0, 0))
    return seen
""",
        {
            "after()": [
                word
                for name in ("first", "first", "other", "other", "first", "other")
                for word in ([0, True], name, 0, True)
            ],
        },
        emulated_only=True,
    ),
    Case(
        "a_thread_in_a_slot_that_nobody_knows",
        ("cuGetExportTable",),
        UNKNOWN_SLOT
        + """
import threading, time
(*_, slot) = slots(b"an emulated slot".hex(), 2)
results = []
def again_and_again():
    while True:
        results.append(slot(ctypes.byref(found), *handles, 40, ctypes.c_double(0.5)))
threading.Thread(target=again_and_again, daemon=True).start()
def go_on():
    count = len(results)
    while len(results) < count + 1000:
        time.sleep(0.001)
    return any(results)
""",
        {"go_on()": False},
        emulated_only=True,
    ),
)
