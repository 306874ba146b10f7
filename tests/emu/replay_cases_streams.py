"""Round trips of streams and events, of what is set of streams, functions and pools, and of work
that names objects in structures: launch attributes, batches of copies, lists of launches."""

from __future__ import annotations

from tests.emu.replay_cases import ANY, Case

_MODE = "cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE"
_ATTRIBUTE = "cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE"

STREAM_CASES = (
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
        "attributes_of_streams",
        ("cuStreamSetAttribute", "cuStreamCopyAttributes"),
        f"""
window = {_ATTRIBUTE}_ACCESS_POLICY_WINDOW
policy = {_ATTRIBUTE}_SYNCHRONIZATION_POLICY
buffer = int(ok(cu.cuMemAlloc(1 << 21)))
stream, other, plain, ended, undone = (ok(cu.cuStreamCreate(1)) for _ in range(5))
value = cu.CUstreamAttrValue()
value.accessPolicyWindow.base_ptr = buffer
value.accessPolicyWindow.num_bytes = 1 << 20
value.accessPolicyWindow.hitRatio = 0.5
value.accessPolicyWindow.hitProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
value.accessPolicyWindow.missProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
for one in (stream, ended):
    ok(cu.cuStreamSetAttribute(one, window, value))
value = cu.CUstreamAttrValue()
value.syncPolicy = cu.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
for one in (stream, undone):
    ok(cu.cuStreamSetAttribute(one, policy, value))
ok(cu.cuStreamCopyAttributes(other, ended))
ok(cu.cuStreamCopyAttributes(undone, plain))
urgent = ok(cu.cuStreamCreateWithPriority(1, -5))
ok(cu.cuStreamCopyAttributes(urgent, plain))
ok(cu.cuStreamDestroy(ended))
def policy_of(stream):
    value = ok(cu.cuStreamGetAttribute(stream, policy))
    return ctypes.c_int.from_address(value.getPtr()).value  # -1 is none of the enumeration
def set_of(stream):
    whole = ok(cu.cuStreamGetAttribute(stream, window))
    kept = whole.accessPolicyWindow
    return [int(kept.base_ptr) == buffer, int(kept.num_bytes), kept.hitRatio, policy_of(stream)]
""",
        {
            "set_of(stream)": [True, 1 << 20, 0.5, 2],
            "set_of(other)": [True, 1 << 20, 0.5, -1],
            "set_of(plain)": [False, 0, 0.0, -1],
            "set_of(undone)": [False, 0, 0.0, -1],
            "ok(cu.cuStreamGetPriority(urgent))": ANY,
        },
        {
            "name(cu.cuStreamCopyAttributes(stream, plain))": "CUDA_SUCCESS",
            "set_of(stream)": [False, 0, 0.0, -1],
        },
    ),
    Case(
        "attributes_of_the_default_stream",
        ("cuStreamSetAttribute",),
        f"""
policy = {_ATTRIBUTE}_SYNCHRONIZATION_POLICY
value = cu.CUstreamAttrValue()
value.syncPolicy = cu.CUsynchronizationPolicy.CU_SYNC_POLICY_YIELD
other = ok(cu.cuStreamCreate(0))
set_it = name(cu.cuStreamSetAttribute(0, policy, value))
copied = name(cu.cuStreamCopyAttributes(other, 0))
def policies():
    return [int(ok(cu.cuStreamGetAttribute(s, policy)).syncPolicy) for s in (0, other)]
before = policies()
""",
        {"[set_it, copied]": ANY, "policies() == before": True},
    ),
    Case(
        "widths_of_banks",
        ("cuCtxSetSharedMemConfig", "cuFuncSetSharedMemConfig"),
        """
wide = cu.CUsharedconfig.CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE
kernel = function(b"inc")
ok(cu.cuCtxSetSharedMemConfig(wide))
ok(cu.cuFuncSetSharedMemConfig(kernel, wide))
before = int(ok(cu.cuCtxGetSharedMemConfig()))
""",
        {"int(ok(cu.cuCtxGetSharedMemConfig())) == before": True, "inc_of(kernel)": 128},
    ),
    Case(
        "launches_in_a_list",
        ("cuLaunchCooperativeKernelMultiDevice",),
        """
kernel, stream = function(b"inc"), ok(cu.cuStreamCreate(1))
class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("params", ctypes.c_void_p),
    ]
def listed(stream):
    buffer = int(ok(cu.cuMemAlloc(4 * 64)))
    ok(cu.cuMemsetD32(buffer, 1, 64))
    values = ctypes.c_uint64(buffer), ctypes.c_uint32(64)
    params = (ctypes.c_void_p * 2)(*(ctypes.addressof(v) for v in values))
    sizes = (ctypes.c_uint * 3)(1, 1, 1), (ctypes.c_uint * 3)(64, 1, 1)
    one = Launch(int(kernel), *sizes, 0, int(stream), ctypes.addressof(params))
    ok(cu.cuCtxSynchronize())
    code = lib.cuLaunchCooperativeKernelMultiDevice(ctypes.byref(one), 1, 0)
    ok(cu.cuCtxSynchronize())
    total = int(download(buffer, 64).sum())
    ok(cu.cuMemFree(buffer))
    return [code, total]
""",
        {"listed(stream)": [0, 128]},
    ),
    Case(
        "events_of_launches",
        (),
        f"""
kernel, waiting, stream = function(b"inc"), function(b"wait_for"), ok(cu.cuStreamCreate(1))
event = ok(cu.cuEventCreate(2))
buffer = int(ok(cu.cuMemAlloc(4 * 64)))
attribute = cu.CUlaunchAttribute()
attribute.id = {_ATTRIBUTE}_LAUNCH_COMPLETION_EVENT
attribute.value.launchCompletionEvent.event = event
shape = cu.CUlaunchConfig()
shape.gridDimX = shape.gridDimY = shape.gridDimZ = shape.blockDimY = shape.blockDimZ = 1
shape.blockDimX = 64
shape.hStream = stream
shape.attrs = [attribute]
shape.numAttrs = 1
def launched():
    ok(cu.cuMemsetD32(buffer, 1, 64))
    ok(cu.cuCtxSynchronize())
    arguments = (buffer, 64), (ctypes.c_uint64, ctypes.c_uint32)
    ok(cu.cuLaunchKernelEx(shape, kernel, arguments, 0))
    ok(cu.cuEventSynchronize(event))
    done = name(cu.cuEventQuery(event))
    ok(cu.cuStreamSynchronize(stream))
    return [done, int(download(buffer, 64).sum())]
""",
        {"launched()": ["CUDA_SUCCESS", 128]},
    ),
    Case(
        "batches_of_copies",
        (),
        """
from tests.emu.array_lib import F32, content, shape as shape_of
stream = ok(cu.cuStreamCreate(1))
source, target = (int(ok(cu.cuMemAlloc(64))) for _ in range(2))
array = ok(cu.cuArray3DCreate(shape_of(8, 0, 0, F32, 1, 0)))
order = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
how = cu.CUmemcpyAttributes()
how.srcAccessOrder = order
def batch(value):
    ok(cu.cuMemsetD32(source, value, 16))
    ok(cu.cuMemsetD32(target, 0, 16))
    ok(cu.cuCtxSynchronize())
    code = name(cu.cuMemcpyBatchAsync(
        [cu.CUdeviceptr(target), cu.CUdeviceptr(target + 32)],
        [cu.CUdeviceptr(source), cu.CUdeviceptr(source + 16)], [16, 8], 2, [how], [0], 1, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [code, *(int(v) for v in download(target, 16))]
copy = cu.CUDA_MEMCPY3D_BATCH_OP()
copy.src.type = cu.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
copy.src.op.ptr.ptr = source
copy.dst.type = cu.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_ARRAY
copy.dst.op.array.array = array
copy.dst.op.array.offset.x = 2
copy.extent.width, copy.extent.height, copy.extent.depth = 4, 1, 1
copy.srcAccessOrder = order
def to_array(value):
    ok(cu.cuMemcpyHtoA(array, 0, bytes(32), 32))
    ok(cu.cuMemsetD32(source, value, 16))
    ok(cu.cuCtxSynchronize())
    code = name(cu.cuMemcpy3DBatchAsync(1, [copy], 0, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [code, *(int(v) for v in content(array).view(np.uint32).ravel())]
""",
        {
            "batch(7)": ["CUDA_SUCCESS", *[7] * 4, *[0] * 4, *[7] * 2, *[0] * 6],
            "to_array(9)": ["CUDA_SUCCESS", 0, 0, 9, 9, 9, 9, 0, 0],
        },
    ),
    Case(
        "words_that_streams_write_and_wait_for",
        (),
        """
import time
stream, other = (ok(cu.cuStreamCreate(1)) for _ in range(2))
word = int(ok(cu.cuMemAlloc(16)))
kinds = cu.CUstreamBatchMemOpType
def operation(kind, address, value):
    one = cu.CUstreamBatchMemOpParams()
    one.operation = kind
    part = one.waitValue if "WAIT" in kind.name else one.writeValue
    part.operation = kind
    part.address = address
    if "64" in kind.name:
        part.value64 = value
    else:
        part.value = value
    part.flags = 0
    return one
def passed():
    ok(cu.cuMemsetD32(word, 0, 4))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuStreamBatchMemOp(stream, 3, [
        operation(kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, word, 3),
        operation(kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, word + 4, 5),
        operation(kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64, word + 8, (1 << 32) + 6)], 0))
    ok(cu.cuStreamWaitValue64(other, word + 8, (1 << 32) + 6, 1))
    time.sleep(0.02)
    states = [name(cu.cuStreamQuery(s)) for s in (stream, other)]
    third = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamWriteValue32(third, word, 4, 0))
    for one in (third, stream, other):
        ok(cu.cuStreamSynchronize(one))
    ok(cu.cuStreamDestroy(third))
    return [*states, *(int(v) for v in download(word, 4))]
""",
        {"passed()": ["NOT_READY", "NOT_READY", 4, 5, 6, 1]},
    ),
    Case(
        "pools_that_other_devices_reach",
        ("cuMemPoolSetAccess",),
        """
from tests.emu.driver_lib import access_of as access, pool_properties
pool, alone = (ok(cu.cuMemPoolCreate(pool_properties())) for _ in range(2))
ok(cu.cuMemPoolSetAccess(pool, [access(1, "READWRITE")], 1))
def allowed(pool, device):
    return int(ok(cu.cuMemPoolGetAccess(pool, access(device, "NONE").location)))
""",
        {
            "[allowed(pool, 0), allowed(pool, 1)]": [3, 3],
            "[allowed(alone, 0), allowed(alone, 1)]": [3, 0],
        },
        {
            "name(cu.cuMemPoolSetAccess(pool, [access(1, 'NONE')], 1))": "CUDA_SUCCESS",
            "allowed(pool, 1)": 0,
        },
        devices=2,
    ),
)
