"""Round trips of host memory, reservations, pools, and of what pointers are said to be."""

from __future__ import annotations

from tests.emu.replay_cases import ANY, Case

_CONTEXT_OF = "cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT"
_TYPE_OF = "cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE"

MEMORY_CASES = (
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
        "managed_pools",
        ("cuMemPoolCreate", "cuMemGetDefaultMemPool", "cuMemGetMemPool", "cuMemSetMemPool"),
        """
from tests.emu.driver_cases_managed import (
    MANAGED, PINNED, from_pool, given_in_a_capture, location, managed_pool, pool_made, told, words
)
where, host = location("DEVICE"), location("HOST")
pool, own = managed_pool(), managed_pool("HOST")
elsewhere = [managed_pool(kind) for kind in ("NONE", "HOST_NUMA", "HOST_NUMA_CURRENT")]
default = ok(cu.cuMemGetDefaultMemPool(where, MANAGED))
plain = ok(cu.cuMemGetDefaultMemPool(where, PINNED))
ok(cu.cuMemSetMemPool(host, MANAGED, own))
threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
reserved = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(1 << 20)))
blocks = [from_pool(one, 3 << 20) for one in (pool, own, default)]
for block in blocks:
    ok(cu.cuMemsetD32(block, 7, 3 << 18))
ok(cu.cuStreamSynchronize(0))
pool_at = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
def used_after(address):
    ok(cu.cuMemFreeAsync(address, 0))
    ok(cu.cuStreamSynchronize(0))
    return int(ok(cu.cuMemPoolGetAttribute(pool, used)))
def beside_a_capture():
    stream, other = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    freed = name(cu.cuMemFreeAsync(from_pool(pool, 40 << 20, other), other))
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(stream))))
    return [freed, used_after(from_pool(pool, 8, other))]
def beside_a_global_capture(pool):
    stream, other = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    refused = [name(cu.cuMemAllocFromPoolAsync(8, pool, one)) for one in (other, stream)]
    return [*refused, name(cu.cuStreamEndCapture(stream))]
""",
        {
            "int(ok(cu.cuMemPoolGetAttribute(pool, reserved)))": 32 << 20,
            "beside_a_capture()": ["CUDA_SUCCESS", 3 << 20],
            "[given_in_a_capture(one) for one in (own, *elsewhere)]": [
                [why, "CUDA_SUCCESS"]
                for why in ("NOT_SUPPORTED", "INVALID_VALUE", "NOT_SUPPORTED", "INVALID_VALUE")
            ],
            "[beside_a_global_capture(one) for one in (pool, own, *elsewhere)]": [
                [
                    *("STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED"),
                    "STREAM_CAPTURE_INVALIDATED",
                ]
            ]
            * 5,
            "int(ok(cu.cuMemPoolGetAttribute(pool, threshold)))": 1 << 20,
            "[[int(n) for n in words(block, 3 << 18)[[0, -1]]] for block in blocks]": [[7, 7]] * 3,
            "[same(ok(cu.cuPointerGetAttribute(pool_at, block)), one) for block, one in "
            "zip(blocks, (pool, own, default))]": [True] * 3,
            "[told('PREFERRED_LOCATION', block, 3 << 20) for block in blocks]": ANY,
            "used_after(from_pool(pool, 8))": 3 << 20,
            "same(ok(cu.cuMemGetDefaultMemPool(where, MANAGED)), default)": True,
            "same(ok(cu.cuMemGetMemPool(where, MANAGED)), default)": True,
            "same(ok(cu.cuMemGetMemPool(where, PINNED)), plain)": True,
            "same(ok(cu.cuMemGetMemPool(host, MANAGED)), own)": True,
            "name(cu.cuMemSetMemPool(where, MANAGED, own))": "INVALID_VALUE",
            "name(cu.cuMemPoolDestroy(default))": "INVALID_VALUE",
            "[name(pool_made(kind, 64 << 20)) for kind in ('NONE', 'DEVICE', 'HOST')]": [
                "INVALID_VALUE"
            ]
            * 3,
            "[name(pool_made(kind, 0, PINNED)) for kind in ('NONE', 'HOST_NUMA_CURRENT')]": [
                "INVALID_VALUE"
            ]
            * 2,
            "ok(cu.cuMemGetAddressRange(blocks[0] + 8))[1]": 3 << 20,
            "name(cu.cuMemFree(blocks[0] + 8))": "INVALID_VALUE",
        },
        {
            "given_in_a_capture(pool) == given_in_a_capture(plain)": True,
            "name(cu.cuMemPoolDestroy(own))": "CUDA_SUCCESS",
            "int(words(blocks[1], 1)[0])": 7,
            "[name(cu.cuMemFreeAsync(block, 0)) for block in blocks]": ["CUDA_SUCCESS"] * 3,
        },
    ),
)
