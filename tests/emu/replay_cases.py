"""Round trips of driver calls under the record: what a program made or set is there afterwards.

A case's setup runs once; what it asks is asked before a checkpoint and after each, and its answer
must stay the same, and be what the case expects where it says so. `last` is asked at the end only:
it changes what it asks about. Nothing here is the emulated driver's own: a real one answers alike,
but to what names an ended object (`ended`, asked last): there it may also end the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ANY = object()  # the same every time; what it is, is the driver's affair


@dataclass(frozen=True)
class Case:
    """One round trip of the functions of `families` (native/intercept/api.def)."""

    name: str
    families: tuple[str, ...]
    setup: str
    asks: dict[str, Any]
    last: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    emulated_only: bool = False


# What they give is refused.
WITHOUT_A_CASE = {
    "cuArrayGetPlane": "arrays of several planes are refused",
    "cuMemMapArrayAsync": "arrays to which memory is mapped are refused",
}

# For every setup: answers by name, a library from a file, values behind pointers.
PRELUDE = '''
import ctypes, pathlib, tempfile
def name(result):
    return result[0].name.removeprefix("CUDA_ERROR_")
def same(one, other):
    return int(one) == int(other)
def inc_of(kernel, count=64, stream=0):
    buffer = int(ok(cu.cuMemAlloc(4 * count)))
    ok(cu.cuMemsetD32(buffer, 1, count))
    ok(cu.cuCtxSynchronize())
    ok(launch_inc(kernel, buffer, count, stream))
    ok(cu.cuCtxSynchronize())
    total = int(download(buffer, count).sum())
    ok(cu.cuMemFree(buffer))
    return total
def file_of(code):
    path = pathlib.Path(tempfile.mkdtemp()) / "code.ptx"
    path.write_bytes(code)
    return str(path).encode()
def value_of(address):
    return int(download(address, 1)[0])
VARIABLES = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter = 5;
.visible .const .align 4 .u32 table[2] = {11, 22};
.visible .entry add() {
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [counter]; add.u32 %r2, %r1, 1; st.global.u32 [counter], %r2; ret;
}
.visible .entry read(.param .u64 p) {
    .reg .b64 %rd<2>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [p]; ld.global.u32 %r1, [counter]; ld.const.u32 %r2, [table];
    st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; ret;
}
""" + bytes(1)
def run(kernel, times, *values):
    for _ in range(times):
        types = (ctypes.c_uint64,) * len(values)
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, (values, types), 0))
    ok(cu.cuCtxSynchronize())
def read_by(kernel):
    buffer = int(ok(cu.cuMemAlloc(8)))
    run(kernel, 1, buffer)
    values = [int(v) for v in download(buffer, 2)]
    ok(cu.cuMemFree(buffer))
    return values
device = ok(cu.cuDeviceGet(0))
primary = ok(cu.cuCtxGetCurrent())
lib = libcuda()
'''

ATTRIBUTE = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
_CARVEOUT = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"
_CONTEXT_OF = "cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT"
_TYPE_OF = "cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE"
_MODE = "cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE"
_PREFER_L1 = "cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1"


CASES = (
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
    Case(
        "streams",
        ("cuStreamCreate", "cuStreamCreateWithPriority", "cuStreamDestroy"),
        """
plain = ok(cu.cuStreamCreate(0))
apart = ok(cu.cuStreamCreate(1))
least, greatest = ok(cu.cuCtxGetStreamPriorityRange())
urgent = ok(cu.cuStreamCreateWithPriority(1, greatest))
ended = ok(cu.cuStreamCreate(0))
ok(cu.cuStreamDestroy(ended))
kernel = function(b"inc")
""",
        {
            "[int(ok(cu.cuStreamGetFlags(s))) for s in (plain, apart, urgent)]": [0, 1, 1],
            "ok(cu.cuStreamGetPriority(plain)), ok(cu.cuStreamGetPriority(urgent)) - greatest": [
                0,
                0,
            ],
            "same(ok(cu.cuStreamGetCtx(apart)), primary)": True,
            "[inc_of(kernel, 64, s) for s in (plain, apart, urgent)]": [128] * 3,
        },
        {"[name(cu.cuStreamDestroy(s)) for s in (urgent, plain)]": ["CUDA_SUCCESS"] * 2},
        {"name(cu.cuStreamQuery(ended))": ANY},
    ),
    Case(
        "callbacks",
        ("cuStreamAddCallback",),
        """
stream = ok(cu.cuStreamCreate(1))
seen = []
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
body = kind(lambda s, code, data: seen.append([s == int(stream), code, data]))
def call_back():
    seen.clear()
    assert lib.cuStreamAddCallback(ctypes.c_void_p(int(stream)), body, ctypes.c_void_p(7), 0) == 0
    ok(cu.cuStreamSynchronize(stream))
    return seen
""",
        {"call_back()": [[True, 0, 7]]},
    ),
    Case(
        "events",
        (
            "cuEventCreate",
            "cuEventDestroy",
            "cuEventElapsedTime",
            "cuEventRecord",
            "cuEventRecordWithFlags",
        ),
        """
import time
stream = ok(cu.cuStreamCreate(1))
new, first, second = (ok(cu.cuEventCreate(0)) for _ in range(3))
untimed = ok(cu.cuEventCreate(2))
ended = ok(cu.cuEventCreate(0))
ok(cu.cuEventDestroy(ended))
ok(cu.cuEventRecord(first, stream))
ok(cu.cuStreamSynchronize(stream))
time.sleep(0.2)
ok(cu.cuEventRecordWithFlags(second, stream, 0))
ok(cu.cuEventRecord(untimed, stream))
ok(cu.cuStreamSynchronize(stream))
def apart(least):
    return ok(cu.cuEventElapsedTime(first, new)) - ok(cu.cuEventElapsedTime(second, new)) > least
""",
        {
            "[name(cu.cuEventQuery(e)) for e in (new, first, second, untimed)]": ["CUDA_SUCCESS"]
            * 4,
            "[name(cu.cuEventSynchronize(e)) for e in (new, first, second)]": ["CUDA_SUCCESS"] * 3,
            "190 <= ok(cu.cuEventElapsedTime(first, second)) < 60_000": True,
            "-60_000 < ok(cu.cuEventElapsedTime(second, first)) <= -190": True,
            "name(cu.cuEventElapsedTime(first, new))": "INVALID_HANDLE",
            "name(cu.cuEventElapsedTime(first, untimed))": "INVALID_HANDLE",
            "name(cu.cuStreamWaitEvent(stream, second, 0))": "CUDA_SUCCESS",
        },
        {
            "name(cu.cuEventRecord(new, stream))": "CUDA_SUCCESS",
            "name(cu.cuStreamSynchronize(stream))": "CUDA_SUCCESS",
            "190 <= ok(cu.cuEventElapsedTime(first, new)) < 60_000": True,
            "-60_000 < ok(cu.cuEventElapsedTime(new, first)) <= -190": True,
            "0 < ok(cu.cuEventElapsedTime(second, new)) < 60_000": True,
            "apart(190)": True,
            "name(cu.cuEventDestroy(first))": "CUDA_SUCCESS",
        },
        {"name(cu.cuEventQuery(ended))": ANY},
    ),
    Case(
        "modules",
        (
            *("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleGetFunction"),
            *("cuModuleEnumerateFunctions", "cuModuleUnload"),
            "cuFuncGetModule",
        ),
        """
ended = ok(cu.cuModuleLoadData(PTX))
ok(cu.cuModuleUnload(ended))
modules = [
    ok(cu.cuModuleLoad(file_of(PTX))),
    ok(cu.cuModuleLoadData(bytes(PTX))),
    ok(cu.cuModuleLoadDataEx(bytes(PTX), 1, [cu.CUjit_option.CU_JIT_OPTIMIZATION_LEVEL], [1])),
]
kernels = [ok(cu.cuModuleGetFunction(m, b"inc")) for m in modules]
def names_in(module):
    count = ok(cu.cuModuleGetFunctionCount(module))
    found = ok(cu.cuModuleEnumerateFunctions(count, module))
    return sorted(ok(cu.cuFuncGetName(f)).decode() for f in found)
""",
        {
            "[inc_of(k) for k in kernels]": [128] * 3,
            "[names_in(m) for m in modules]": [["bump", "inc", "wait_for"]] * 3,
            "[same(ok(cu.cuFuncGetModule(k)), m) for k, m in zip(kernels, modules)]": [True] * 3,
            "[same(ok(cu.cuModuleGetFunction(m, b'inc')), k) for k, m in zip(kernels, modules)]": [
                True
            ]
            * 3,
            "name(cu.cuModuleGetFunction(modules[0], b'none'))": "NOT_FOUND",
        },
        {
            "name(cu.cuModuleUnload(modules[1]))": "CUDA_SUCCESS",
            "inc_of(kernels[0])": 128,
        },
        {"name(cu.cuModuleGetFunction(ended, b'inc'))": ANY},
    ),
    Case(
        # The real driver takes what a compiler has written, and ends at the one of the tests.
        "fat_binaries",
        ("cuModuleLoadFatBinary",),
        """
from tests.emu.fatbins import fatbin
module = ok(cu.cuModuleLoadFatBinary(fatbin(PTX, "zstd")))
kernel = ok(cu.cuModuleGetFunction(module, b"inc"))
""",
        {"inc_of(kernel)": 128},
        {"name(cu.cuModuleUnload(module))": "CUDA_SUCCESS"},
        emulated_only=True,
    ),
    Case(
        "variables_of_modules",
        ("cuModuleGetGlobal",),
        """
module = ok(cu.cuModuleLoadData(VARIABLES))
run(ok(cu.cuModuleGetFunction(module, b"add")), 2)
read = ok(cu.cuModuleGetFunction(module, b"read"))
other = ok(cu.cuModuleLoadData(VARIABLES))
read_other = ok(cu.cuModuleGetFunction(other, b"read"))
""",
        {
            "[read_by(read), read_by(read_other)]": [[7, 11], [5, 11]],
            "name(cu.cuModuleGetGlobal(module, b'none'))": "NOT_FOUND",
        },
        {
            "value_of(ok(cu.cuModuleGetGlobal(module, b'counter'))[0])": 7,
            "ok(cu.cuModuleGetGlobal(other, b'table'))[1]": 8,
        },
    ),
    Case(
        "libraries",
        (
            *(
                "cuLibraryLoadData",
                "cuLibraryLoadFromFile",
                "cuLibraryUnload",
                "cuLibraryGetKernel",
            ),
            *("cuLibraryEnumerateKernels", "cuLibraryGetModule", "cuKernelGetFunction"),
        ),
        """
def load(code):
    return ok(cu.cuLibraryLoadData(code, [], [], 0, [], [], 0))
ended = load(PTX)
ok(cu.cuLibraryUnload(ended))
preserved, text = ctypes.c_void_p(), ctypes.create_string_buffer(PTX)
options = (ctypes.c_int * 1)(cu.CUlibraryOption.CU_LIBRARY_BINARY_IS_PRESERVED)
loaded = lib.cuLibraryLoadData(ctypes.byref(preserved), text, None, None, 0, options, None, 1)
assert loaded == 0  # an option that has no value, and no array of them
libraries = [
    load(bytes(PTX)),
    ok(cu.cuLibraryLoadFromFile(file_of(PTX), [], [], 0, [], [], 0)),
    cu.CUlibrary(preserved.value),
]
kernels = [ok(cu.cuLibraryGetKernel(l, b"inc")) for l in libraries]
functions = [ok(cu.cuKernelGetFunction(k)) for k in kernels]
modules = [ok(cu.cuLibraryGetModule(l)) for l in libraries]
def names_in(library):
    count = ok(cu.cuLibraryGetKernelCount(library))
    found = ok(cu.cuLibraryEnumerateKernels(count, library))
    return sorted(ok(cu.cuKernelGetName(k)).decode() for k in found)
""",
        {
            "[inc_of(f) for f in functions]": [128] * 3,
            "[inc_of(cu.CUfunction(int(k))) for k in kernels]": [128] * 3,
            "[names_in(l) for l in libraries]": [["bump", "inc", "wait_for"]] * 3,
            "[same(ok(cu.cuLibraryGetKernel(l, b'inc')), k) for l, k in zip(libraries, kernels)]": [
                True
            ]
            * 3,
            "[same(ok(cu.cuKernelGetFunction(k)), f) for k, f in zip(kernels, functions)]": [True]
            * 3,
            "[same(ok(cu.cuLibraryGetModule(l)), m) for l, m in zip(libraries, modules)]": [True]
            * 3,
            "inc_of(ok(cu.cuModuleGetFunction(modules[0], b'inc')))": 128,
            "name(cu.cuLibraryGetKernel(libraries[0], b'none'))": "NOT_FOUND",
        },
        {"name(cu.cuLibraryUnload(libraries[0]))": "CUDA_SUCCESS", "inc_of(functions[1])": 128},
        {"name(cu.cuLibraryGetKernel(ended, b'inc'))": ANY},
    ),
    Case(
        "variables_of_libraries",
        ("cuLibraryGetGlobal",),
        """
library = ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0))
def kernel(wanted):
    return ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, wanted))))
run(kernel(b"add"), 3)
""",
        {
            "read_by(kernel(b'read'))": [8, 11],
            "name(cu.cuLibraryGetGlobal(library, b'none'))": "NOT_FOUND",
        },
        {"value_of(ok(cu.cuLibraryGetGlobal(library, b'counter'))[0])": 8},
    ),
    Case(
        "variables_without_code",
        ("cuModuleGetGlobal", "cuLibraryGetGlobal"),
        """
TABLE = b".version 7.0\\n.target sm_70\\n.address_size 64\\n" + (
    b".visible .global .align 8 .b32 table[4] = {3, 1, 4, 1};" + bytes(1)
)
first, module = (ok(cu.cuModuleLoadData(TABLE)) for _ in range(2))
library = ok(cu.cuLibraryLoadData(TABLE, [], [], 0, [], [], 0))
ok(cu.cuModuleGetGlobal(first, b"table"))
tables = [
    int(ok(ask(owner, b"table"))[0])
    for ask, owner in ((cu.cuModuleGetGlobal, module), (cu.cuLibraryGetGlobal, library))
]
ok(cu.cuModuleUnload(first))
inc = function(b"inc")
def next_of(table):
    ok(launch_inc(inc, table, 4))
    return download(table, 4).tolist()
""",
        {
            "[int(ok(cu.cuModuleGetGlobal(module, b'table'))[0]) == tables[0],"
            " int(ok(cu.cuLibraryGetGlobal(library, b'table'))[0]) == tables[1]]": [True, True],
            "ok(cu.cuModuleGetGlobal(module, b'table'))[1]": 16,
        },
        {"[next_of(table) for table in tables]": [[4, 2, 5, 2]] * 2},
    ),
    Case(
        "settings_of_functions",
        (
            *("cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuKernelSetAttribute"),
            "cuKernelSetCacheConfig",
        ),
        f"""
kernel = function(b"inc")
for value in (1024, 48 << 10):
    ok(cu.cuFuncSetAttribute(kernel, {ATTRIBUTE}, value))
ok(cu.cuFuncSetAttribute(kernel, {_CARVEOUT}, 50))
ok(cu.cuFuncSetCacheConfig(kernel, {_PREFER_L1}))
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
late = ok(cu.cuLibraryGetKernel(library, b"inc"))
ok(cu.cuKernelSetAttribute({ATTRIBUTE}, 8192, late, device))
ok(cu.cuKernelSetCacheConfig(late, {_PREFER_L1}, device))
""",
        {
            f"ok(cu.cuFuncGetAttribute({ATTRIBUTE}, kernel))": 48 << 10,
            f"ok(cu.cuFuncGetAttribute({_CARVEOUT}, kernel))": 50,
            f"ok(cu.cuKernelGetAttribute({ATTRIBUTE}, late, device))": 8192,
            f"ok(cu.cuFuncGetAttribute({ATTRIBUTE}, ok(cu.cuKernelGetFunction(late))))": 8192,
            f"name(cu.cuFuncSetAttribute(kernel, {ATTRIBUTE}, -1))": "INVALID_VALUE",
        },
    ),
    Case(
        "a_setting_of_a_kernel_again_and_again",  # as cuBLAS does before launches
        ("cuKernelSetAttribute",),
        f"""
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
late, other = (ok(cu.cuLibraryGetKernel(library, name)) for name in (b"inc", b"inc"))
def set_to(value, which={ATTRIBUTE}):
    return name(cu.cuKernelSetAttribute(which, value, late, device))
def is_set():
    return [ok(cu.cuKernelGetAttribute(a, late, device)) for a in ({ATTRIBUTE}, {_CARVEOUT})]
for value in (1024, 8192, 4096, 4096, 1024):
    assert set_to(value) == "CUDA_SUCCESS"
assert set_to(20, {_CARVEOUT}) == "CUDA_SUCCESS" and set_to(-1) == "INVALID_VALUE"
def later(value):
    return [set_to(value), set_to(value), *is_set()]
""",
        {"is_set()": [1024, 20]},
        {
            "later(2048)": ["CUDA_SUCCESS", "CUDA_SUCCESS", 2048, 20],
            "later(1024)": ["CUDA_SUCCESS", "CUDA_SUCCESS", 1024, 20],
        },
        ended={"ok(cu.cuLibraryUnload(library)); set_to(1024)": ANY},
    ),
    Case(
        "host_memory",
        (
            *("cuMemAllocHost", "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister"),
            *("cuMemHostUnregister", "cuMemHostGetFlags"),
        ),
        """
allocated = int(ok(cu.cuMemAllocHost(5000)))
mapped = int(ok(cu.cuMemHostAlloc(1 << 20, 7)))
gone = int(ok(cu.cuMemHostAlloc(4096, 0)))
ok(cu.cuMemFreeHost(gone))
pages = np.zeros(8192, np.uint8)
own = (pages.ctypes.data + 4095) & ~4095
ok(cu.cuMemHostRegister(own, 4096, 2))
left = np.zeros(8192, np.uint8)
given_up = (left.ctypes.data + 4095) & ~4095
ok(cu.cuMemHostRegister(given_up, 4096, 0))
ok(cu.cuMemHostUnregister(given_up))
for place, value in ((allocated, 1), (mapped, 2), (own, 3)):
    ctypes.memset(place, value, 4096)
buffer = int(ok(cu.cuMemAlloc(4096)))
def through(place):
    ok(cu.cuMemcpyHtoDAsync(buffer, place, 4096, 0))
    ok(cu.cuStreamSynchronize(0))
    return int(download(buffer, 4096, np.uint8).sum()) // 4096
""",
        {
            "[through(p) for p in (allocated, mapped, own)]": [1, 2, 3],
            "[ok(cu.cuMemHostGetFlags(p)) for p in (allocated, mapped, mapped + 5000, own)]": ANY,
            "ok(cu.cuMemHostGetFlags(mapped))": 7,
            "name(cu.cuMemHostGetFlags(given_up))": "INVALID_VALUE",
            "name(cu.cuMemHostRegister(own, 4096, 0))": "HOST_MEMORY_ALREADY_REGISTERED",
            "name(cu.cuMemHostUnregister(mapped))": "INVALID_VALUE",
        },
        {
            "[name(cu.cuMemFreeHost(p)) for p in (allocated, mapped)]": ["CUDA_SUCCESS"] * 2,
            "name(cu.cuMemHostUnregister(own))": "CUDA_SUCCESS",
            "name(cu.cuMemFreeHost(mapped))": "INVALID_VALUE",
        },
    ),
    # What the driver says of it before the checkpoint is what it has to say afterwards.
    Case(
        "host_memory_that_the_program_has_let_go_of",
        ("cuMemHostRegister", "cuMemHostUnregister", "cuMemAllocHost", "cuMemFreeHost"),
        """
import mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE, SIZE = 4096, 4 * 4096
PRIVATE, SHARED, FIXED, ANONYMOUS, FREE = 2, 1, 16, 32, 0x100000
free = 0x3f0000000000  # nobody else's memory comes where the program has let go of some
def mapped(at=None, protection=3, flags=PRIVATE | ANONYMOUS, file=-1):
    global free
    if at is None:
        at, free, flags = free, free + MIB, flags | FREE
    address = libc.mmap(at, SIZE, protection, flags, file, 0)
    assert address == at, os.strerror(ctypes.get_errno())
    return address
def filled(address, value):
    ctypes.memset(address, value, SIZE)
    return address
def closed(address, size, protection):
    assert libc.mprotect(address, size, protection) == 0
def file_of(pages, value=0):
    # Linux lets nobody pin shared pages of a file for long, but of one in memory.
    file = tempfile.TemporaryFile(dir="/dev/shm")
    file.write(bytes([value]) * pages * PAGE)
    file.flush()
    return file
def unmap(address):
    libc.munmap(address, SIZE)
def unmap_part(address):
    libc.munmap(address + PAGE, 2 * PAGE)
def close_it(address):
    closed(address, SIZE, 0)
def only_read(address):
    closed(address + PAGE, PAGE, 1)
def anew(address):
    unmap(address)
    filled(mapped(address, flags=PRIVATE | ANONYMOUS | FIXED), 7)
def decommit(address):
    mapped(address, 0, PRIVATE | ANONYMOUS | FIXED)
def in_its_place(address):
    path = tempfile.mktemp()
    with open(path, "wb") as file:
        file.write(bytes([8]) * SIZE)
    with open(path, "rb") as file:
        mapped(address, 1, SHARED | FIXED, file.fileno())
def cut(address):
    os.ftruncate(files[address].fileno(), PAGE)
def cut_and_close(address):
    cut(address)
    closed(address + PAGE, 2 * PAGE, 0)
files = {}
def registered(let_go, value):
    if let_go in (cut, cut_and_close):
        file = file_of(4, value)
        address = mapped(flags=SHARED, file=file.fileno())
        files[address] = file
    else:
        address = filled(mapped(), value)
    ok(cu.cuMemHostRegister(address + 256, SIZE - 512, 0))
    let_go(address)
    return address + 256
def allocated(let_go):
    address = int(ok(cu.cuMemAllocHost(SIZE)))
    let_go(address)
    return address
ways = [unmap, unmap_part, close_it, only_read, anew, in_its_place, cut, cut_and_close, decommit]
gone = [registered(way, 1 + n) for n, way in enumerate(ways)]
own = [allocated(way) for way in (close_it, decommit)]
tried = [registered(way, 1) for way in ways]
told = [name(cu.cuMemHostUnregister(address)) for address in tried]
buffer = int(ok(cu.cuMemAlloc(PAGE)))
def through(place, size=1024):
    ok(cu.cuMemcpyHtoD(buffer, place, size))
    return int(download(buffer, 1, np.uint8)[0])
def mappings():
    found = []
    for line in open("/proc/self/maps"):
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        for number, address in enumerate((*gone, *own)):
            if start < address + SIZE and address < end and address - 256 < end:
                first, last = (max(0, min(SIZE, at - (address & ~4095))) for at in (start, end))
                found.append((number, first, last, line.split()[1]))
    return [row for row in found if row[1] < row[2]]
""",
        {
            "mappings()": ANY,
            "[name(cu.cuMemHostRegister(p, 1024, 0)) for p in gone]": ANY,
            "[name(cu.cuMemHostGetFlags(p)) for p in (*gone, *own)]": ANY,
            f"[name(cu.cuPointerGetAttribute({_TYPE_OF}, p)) for p in (*gone, *own)]": ANY,
            "[ctypes.string_at(gone[way], 1)[0] for way in (1, 3, 4, 5, 6, 7)]": [2, 4, 7, 8, 7, 8],
            "[through(gone[way]) for way in (1, 3, 6, 7)]": [2, 4, 7, 8],
        },
        {
            "closed(gone[2] - 256, SIZE, 3); [through(gone[2]), through(gone[2] + PAGE)]": [3, 3],
            "[name(cu.cuMemHostUnregister(address)) for address in gone] == told": True,
            "[name(cu.cuMemHostUnregister(address)) for address in gone]": [
                "HOST_MEMORY_NOT_REGISTERED"
            ]
            * 9,
            "[name(cu.cuMemFreeHost(address)) for address in own]": ["CUDA_SUCCESS"] * 2,
        },
    ),
    Case(
        "reservations",
        ("cuMemAddressReserve", "cuMemAddressFree"),
        """
kept = int(ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0)))
gone = int(ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0)))
ok(cu.cuMemAddressFree(gone, 4 * MIB))
memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
ok(cu.cuMemMap(kept + GRANULE, GRANULE, 0, memory, 0))
ok(allow(kept + GRANULE, GRANULE))
ok(cu.cuMemsetD32(kept + GRANULE, 9, GRANULE // 4))
""",
        {
            "int(download(kept + GRANULE, GRANULE // 4).sum()) // (GRANULE // 4)": 9,
            "name(cu.cuMemAddressFree(kept, 8 * MIB))": ANY,
            "name(cu.cuMemsetD32(kept, 1, 1))": ANY,
        },
        {
            "name(cu.cuMemUnmap(kept + GRANULE, GRANULE))": "CUDA_SUCCESS",
            "name(cu.cuMemAddressFree(kept, 8 * MIB))": "CUDA_SUCCESS",
            "name(cu.cuMemRelease(memory))": "CUDA_SUCCESS",
        },
    ),
    # The driver packs small ones together, and a wish takes 32 MiB.
    Case(
        "small_reservations",
        ("cuMemAddressReserve", "cuMemAddressFree"),
        """
sizes = [2 * MIB, 2 * MIB, 10 * MIB, 4 * MIB, 10 * MIB, 10 * MIB, 2 * MIB, 40 * MIB, 2 * MIB]
kept = [(int(ok(cu.cuMemAddressReserve(size, 0, 0, 0))), size) for size in sizes]
ok(cu.cuMemAddressFree(*kept.pop(3)))
memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
for number, (start, _) in enumerate(kept):
    ok(cu.cuMemMap(start, GRANULE, 0, memory, 0))
    ok(allow(start, GRANULE))
    ok(cu.cuMemsetD32(start, number, GRANULE // 4))
def range_of(start):
    names = ("RANGE_START_ADDR", "RANGE_SIZE")
    keys = (getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}") for name in names)
    return tuple(int(ok(cu.cuPointerGetAttribute(key, start))) for key in keys)
""",
        {
            "[int(download(start, 4)[0]) for start, _ in kept]": [7] * 8,
            "[range_of(start) for start, _ in kept] == kept": True,
            "[int(ok(cu.cuMemGetAddressRange(start))[1]) for start, _ in kept]": ANY,
            "[name(cu.cuMemAddressFree(*one)) for one in kept]": ["INVALID_VALUE"] * 8,
            "name(cu.cuMemAddressFree(kept[0][0], 4 * MIB))": "INVALID_VALUE",
            "int(ok(cu.cuMemAddressReserve(2 * MIB, 0, 0, 0))) in dict(kept)": False,
        },
        {
            "[name(cu.cuMemUnmap(start, GRANULE)) for start, _ in kept]": ["CUDA_SUCCESS"] * 8,
            "[name(cu.cuMemAddressFree(*one)) for one in kept]": ["CUDA_SUCCESS"] * 8,
        },
    ),
    Case(
        "attributes_of_pointers",
        ("cuPointerGetAttribute", "cuPointerGetAttributes", "cuMemGetAddressRange"),
        """
memory = int(ok(cu.cuMemAlloc(4096)))
host = int(ok(cu.cuMemHostAlloc(4096, 2)))
module = ok(cu.cuModuleLoadData(VARIABLES))
table = int(ok(cu.cuModuleGetGlobal(module, b"table"))[0])
""",
        {
            "[int(v) for v in ok(cu.cuMemGetAddressRange(memory + 8))] == [memory, 4096]": True,
            f"int(ok(cu.cuPointerGetAttribute({_TYPE_OF}, table)))": 2,
            f"same(ok(cu.cuPointerGetAttribute({_CONTEXT_OF}, memory)), primary)": True,
            f"[int(ok(cu.cuPointerGetAttribute({_TYPE_OF}, p))) for p in (memory, host)]": [2, 1],
            f"same(ok(cu.cuPointerGetAttributes(2, [{_CONTEXT_OF}, {_TYPE_OF}], memory))[0], "
            "primary)": True,
        },
    ),
    Case(
        "default_pools",
        ("cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool", "cuMemPoolSetAttribute"),
        """
pool = ok(cu.cuDeviceGetDefaultMemPool(device))
threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
reuse = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(1 << 40)))
ok(cu.cuMemPoolSetAttribute(pool, reuse, 0))
""",
        {
            "same(ok(cu.cuDeviceGetDefaultMemPool(device)), pool)": True,
            "same(ok(cu.cuDeviceGetMemPool(device)), pool)": True,
            "int(ok(cu.cuMemPoolGetAttribute(pool, threshold)))": 1 << 40,
            "ok(cu.cuMemPoolGetAttribute(pool, reuse))": 0,
            "name(cu.cuMemPoolTrimTo(pool, 0))": "CUDA_SUCCESS",
        },
    ),
    Case(
        "pools",
        ("cuMemPoolCreate", "cuMemPoolDestroy", "cuMemPoolGetAttribute"),
        """
from tests.emu.driver_lib import access_of, pool_properties
pool, gone = (ok(cu.cuMemPoolCreate(pool_properties())) for _ in range(2))
threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(1 << 20)))
kept = int(ok(cu.cuMemAllocFromPoolAsync(8192, pool, 0)))
default = int(ok(cu.cuMemAllocAsync(8, 0)))
nothing = int(ok(cu.cuMemAllocAsync(0, 0)))
# Its own device has that without being given it.
ok(cu.cuMemPoolSetAccess(pool, [access_of(0, "READWRITE")], 1))
ok(cu.cuMemsetD32(kept, 7, 2048))
ok(cu.cuMemsetD32(default, 8, 2))
ok(cu.cuMemPoolDestroy(gone))
pool_at = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
def freed(address):
    ok(cu.cuMemFreeAsync(address, 0))
    ok(cu.cuStreamSynchronize(0))
    return int(ok(cu.cuMemPoolGetAttribute(pool, used)))
""",
        {
            "int(ok(cu.cuMemPoolGetAttribute(pool, threshold)))": 1 << 20,
            "int(ok(cu.cuMemPoolGetAttribute(pool, used))) >= 8192": True,
            "[int(n) for n in download(kept, 2048)[[0, -1]]]": [7, 7],
            "[int(n) for n in download(default, 2)]": [8, 8],
            "same(ok(cu.cuPointerGetAttribute(pool_at, kept)), pool)": True,
            "ok(cu.cuMemGetAddressRange(kept + 8))[1]": 8192,
            "freed(int(ok(cu.cuMemAllocFromPoolAsync(8, pool, 0)))) >= 8192": True,
            "name(cu.cuMemFree(kept + 8))": "INVALID_VALUE",
            "[nothing, name(cu.cuMemFreeAsync(nothing, 0))]": [0, "CUDA_SUCCESS"],
        },
    ),
    Case(
        "capture_modes",
        ("cuThreadExchangeStreamCaptureMode",),
        f"""
ok(cu.cuThreadExchangeStreamCaptureMode({_MODE}_RELAXED))
def mode():
    found = ok(cu.cuThreadExchangeStreamCaptureMode({_MODE}_GLOBAL))
    ok(cu.cuThreadExchangeStreamCaptureMode(found))
    return int(found)
""",
        {"mode()": 2},
    ),
    Case(
        "names_that_the_driver_gave",  # their memory stays
        ("cuFuncGetName", "cuKernelGetName"),
        """
from tests.emu.driver_lib import libcuda
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"inc"))
of_kernel, of_function = ctypes.c_char_p(), ctypes.c_char_p()
function = ok(cu.cuKernelGetFunction(kernel))
inc_of(function)
assert libcuda().cuKernelGetName(ctypes.byref(of_kernel), ctypes.c_void_p(int(kernel))) == 0
assert libcuda().cuFuncGetName(ctypes.byref(of_function), ctypes.c_void_p(int(function))) == 0
""",
        {"of_kernel.value.decode()": "inc", "of_function.value.decode()": "inc"},
    ),
    Case(
        "code_that_was_not_launched",  # a driver loads it when it is, unless it loads all at once
        ("cuModuleLoadData", "cuModuleGetFunction", "cuLibraryLoadData", "cuLibraryGetKernel"),
        """
module = ok(cu.cuModuleLoadData(PTX))
function = ok(cu.cuModuleGetFunction(module, b"inc"))
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"inc"))
def functions(module):
    found = ok(cu.cuModuleEnumerateFunctions(ok(cu.cuModuleGetFunctionCount(module)), module))
    return {ok(cu.cuFuncGetName(function)).decode(): function for function in found}
def states(module):
    return {name: int(ok(cu.cuFuncIsLoaded(one))) for name, one in functions(module).items()}
listed = ok(cu.cuModuleLoadData(PTX))
from_list = functions(listed)["inc"]
loaded = ok(cu.cuModuleLoadData(PTX))
ok(cu.cuFuncLoad(ok(cu.cuModuleEnumerateFunctions(1, loaded))[0]))
""",
        {
            "int(ok(cu.cuModuleGetLoadingMode()))": ANY,
            "int(ok(cu.cuFuncIsLoaded(function)))": 1,
            "states(module)": ANY,
            "states(listed)": ANY,
            "states(loaded)": ANY,
            "states(ok(cu.cuLibraryGetModule(library)))": ANY,
        },
        last={"inc_of(function)": 128, "inc_of(kernel)": 128, "inc_of(from_list)": 128},
    ),
)
