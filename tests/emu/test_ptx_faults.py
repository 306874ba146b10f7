"""What a kernel must not do, what the interpreter refuses, and what one launch wrote."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_runner import Kernel, LaunchError, Pointer, PtxError, compile_cuda, run

from tests.emu.cuda_source import assemble

f4, i4, u4 = np.float32, np.int32, np.uint32
HEADER = ".version 9.0\n.target sm_80\n.address_size 64\n"


def kernel(source: str) -> Kernel:
    return Kernel(compile_cuda(source), "k")


def stopped(
    source: str, outcome: str, *args: object, block: int = 32, shared: int = 0
) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        kernel(source).run(1, block, args, shared)
    assert caught.value.outcome == outcome
    return caught.value


STORE = 'extern "C" __global__ void k(int* o, int n) { if (threadIdx.x < n) o[threadIdx.x] = 5; }'


def test_a_store_past_the_end_is_an_illegal_address_and_names_the_thread() -> None:
    out = np.zeros(20, i4)
    error = stopped(STORE, "illegal_address", out, i4(21))
    assert error.address & 0xFFFF == 80
    assert "st.global.u32" in error.detail and "thread (20,0,0)" in error.detail
    assert np.all(out == 5)


def test_a_store_to_read_only_memory_is_an_illegal_address() -> None:
    out = np.zeros(32, i4)
    out.flags.writeable = False
    stopped(STORE, "illegal_address", out, i4(1))


def test_a_load_of_the_null_pointer_is_an_illegal_address() -> None:
    source = 'extern "C" __global__ void k(volatile int** o) { *o[0] = 1; }'
    assert stopped(source, "illegal_address", np.zeros(1, np.uint64)).address == 0


def test_host_memory_is_not_device_memory() -> None:
    host = np.zeros(4, i4)
    source = 'extern "C" __global__ void k(int* o) { *o = 1; }'
    stopped(source, "illegal_address", np.uint64(host.ctypes.data))
    assert not host.any()


def test_an_unaligned_access_is_a_misaligned_address() -> None:
    out = np.zeros(32, i4)
    for offset in (1, 2, 3):
        stopped(STORE, "misaligned_address", Pointer(out, offset), i4(1))
    source = 'extern "C" __global__ void k(float4* o) { o[threadIdx.x] = make_float4(1, 2, 3, 4); }'
    stopped(source, "misaligned_address", Pointer(np.zeros(600, f4), 8))


def test_shared_memory_ends_where_the_launch_says() -> None:
    source = """extern "C" __global__ void k(int* o) {
        extern __shared__ int s[]; s[threadIdx.x] = 1; __syncthreads(); *o = s[0];
    }"""
    kernel(source).run(1, 32, [np.zeros(1, i4)], shared=128)
    stopped(source, "illegal_address", np.zeros(1, i4), shared=124)
    stopped(source, "illegal_address", np.zeros(1, i4), shared=0)


def test_local_memory_ends_with_the_frame() -> None:
    source = """extern "C" __global__ void k(int* o, int n) {
        int v[8]; for (int i = 0; i < 8; ++i) v[i] = o[i]; *o = v[n];
    }"""
    stopped(source, "illegal_address", np.zeros(8, i4), i4(5000))


SHARED = """__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(int* o, int n) {
    __shared__ __align__(16) char s[512];
    unsigned long long state;
    unsigned a = at(s), r[8] = {};
    BODY
    *o = (int)(state + r[0]);
}"""
ARRIVE = 'asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(a));'
INIT = 'asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(a), "r"(n));'
COPY = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(a), "l"(o + n));'
LDMATRIX = """asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
    : "=r"(r[0]) : "r"(a + n + threadIdx.x % 8 * 16));"""
WMMA = """asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.f32 "
    "{%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
    : "l"(o + n), "r"(16));"""


@pytest.mark.parametrize(
    ("body", "n", "outcome"),
    [
        (COPY, 0, "ok"),
        (COPY, 1, "misaligned_address"),
        (COPY, 256, "illegal_address"),
        (LDMATRIX, 0, "ok"),
        (LDMATRIX, 2, "misaligned_address"),
        (LDMATRIX, 448, "illegal_address"),
        (WMMA, 0, "ok"),
        (WMMA, 1, "misaligned_address"),
        (WMMA, 8, "illegal_address"),
        (INIT + ARRIVE, 32, "ok"),
        (INIT + ARRIVE, 31, "ok"),  # the second phase has begun
        (INIT, 0, "illegal_instruction"),
        (ARRIVE, 0, "illegal_instruction"),  # no object is there
        ("a += n;" + INIT, 4, "misaligned_address"),
        ("a += n;" + INIT, 512, "illegal_address"),
        (INIT.replace(".shared", "").replace('"r"(a)', '"l"(o)'), 1, "illegal_address"),
        ("if (threadIdx.x < n) return;" + LDMATRIX, 8, "illegal_instruction"),
    ],
)
def test_accesses_to_shared_memory_are_checked(body: str, n: int, outcome: str) -> None:
    launch = kernel(SHARED.replace("BODY", body)).run
    if outcome == "ok":
        launch(1, 32, [np.zeros(256, i4), i4(n)])
        return
    with pytest.raises(LaunchError) as caught:
        launch(1, 32, [np.zeros(256, i4), i4(n)])
    assert caught.value.outcome == outcome


def test_an_arrival_too_many_in_one_phase_stops_the_kernel() -> None:
    count = 'asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;"'
    body = INIT + count + ': "=l"(state) : "r"(a));'
    stopped(SHARED.replace("BODY", body), "illegal_instruction", np.zeros(256, i4), i4(32))
    kernel(SHARED.replace("BODY", body)).run(1, 32, [np.zeros(256, i4), i4(33)])


def test_a_barrier_that_some_threads_never_reach_is_a_deadlock() -> None:
    source = """extern "C" __global__ void k(volatile int* o) {
        if (threadIdx.x < 7) asm volatile("bar.sync 1;"); else asm volatile("bar.sync 2;");
        o[0] = 1;
    }"""
    error = stopped(source, "launch_failure", np.zeros(1, i4))
    assert "deadlock" in error.detail and "bar.sync" in error.detail


def test_a_shuffle_that_named_lanes_never_join_is_a_deadlock() -> None:
    source = """extern "C" __global__ void k(int* o) {
        if (threadIdx.x < 16) o[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 3);
        else __syncthreads();
    }"""
    error = stopped(source, "launch_failure", np.zeros(32, i4))
    assert "deadlock" in error.detail


def test_lanes_that_have_left_are_not_waited_for() -> None:
    out = np.zeros(32, i4)
    source = """extern "C" __global__ void k(int* o) {
        if (threadIdx.x >= 16) return;
        o[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 3);
    }"""
    kernel(source).run(1, 32, [out])
    assert np.all(out[:16] == 3) and not out[16:].any()


def test_trap_and_assert() -> None:
    stopped('extern "C" __global__ void k() { __trap(); }', "launch_failure")
    source = 'extern "C" __global__ void k(int n) { assert(threadIdx.x != 3 || n == 0); }'
    kernel(source).run(1, 32, [i4(0)])
    error = stopped(source, "assert_failed", i4(1))
    assert "thread (3,0,0)" in error.detail


def test_an_endless_loop_ends_when_cancelled() -> None:
    out = np.zeros(1, i4)
    looping = kernel('extern "C" __global__ void k(volatile int* o) { while (*o == 0) { } }')
    timer = looping.cancel_after(0.2)
    with pytest.raises(LaunchError) as caught:
        looping.run(3, 32, [out])
    timer.join()
    assert caught.value.outcome == "cancelled"


@pytest.mark.parametrize("block", [(0, 1, 1), (1025, 1, 1), (32, 33, 1)])
def test_a_block_size_out_of_range_is_refused(block: tuple[int, int, int]) -> None:
    with pytest.raises(LaunchError, match="block size"):
        kernel(STORE).run(1, block, [np.zeros(1, i4), i4(0)])


def test_launch_bounds_are_enforced() -> None:
    bounded = kernel('extern "C" __global__ void __launch_bounds__(64) k(int* o) { *o = 1; }')
    assert bounded.attributes()["threads"] == 64
    bounded.run(1, 64, [np.zeros(1, i4)])
    with pytest.raises(LaunchError, match="block size"):
        bounded.run(1, 96, [np.zeros(1, i4)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "line 6: unknown instruction frobnicate.b32"),
        ("add.q32 %r1, %r2, %r2;", "no known type"),
        ("add.sat.u64 %rd1, %rd1, %rd1;", "add.sat.u64: not supported"),
        ("add.s32 %r1, %r2;", "wrong number of operands"),
        ("add.s32 %r1, %rd1, %r2;", "differ in size"),
        ("ld.global.surprise.u32 %r1, [%rd1];", "unknown modifier .surprise"),
        ("mov.u32 %r9, 1;", "%r9: no such register"),
        ("bra $nowhere;", "$nowhere: no such label"),
        ("mov.u64 %rd1, nothing;", "nothing: no such symbol"),
        ("mov.u64 %rd1, k+8;", "k: no arithmetic with the address of a function"),
        ("ld.global.u64 %rd1, [k];", "k: no such variable"),
        ("wgmma.fence.sync.aligned;", "unknown instruction wgmma.fence.sync.aligned"),
        ("mov.u32 %r1, %clusterid.x;", "%clusterid.x: no such register"),
        ("call.uni missing, ();", "missing: no such function"),
        (
            "mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%r1,%r1,%r1,%r1},"
            "{%r1,%r1,%r1,%r1}, {%r1,%r1}, {%r1,%r1,%r1,%r1};",
            "col.row.f32.f16.f16.f32: not supported",
        ),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.bf16.f32 {%r1,%r1,%r1,%r1},"
            "{%r1,%r1,%r1,%r1}, {%r1,%r1}, {%r1,%r1,%r1,%r1};",
            "f32.tf32.bf16.f32: not supported",
        ),
        (
            "mma.sync.aligned.m16n8k8.row.col.satfinite.f16.f16.f16.f16 {%r1,%r1},"
            "{%r1,%r1}, {%r1}, {%r1,%r1};",
            "satfinite.f16.f16.f16.f16: not supported",
        ),
        (
            "wmma.load.a.sync.aligned.row.m16n16k8.f16 {%r1,%r1,%r1,%r1}, [%rd1], %r1;",
            "m16n16k8.f16: not supported",
        ),
        ("mbarrier.try_wait.shared.b64 %r1, [%r1], %rd1;", "unknown modifier .try_wait"),
        ("mbarrier.inval.shared.b64 [%r1], 1;", "wrong number of operands"),
        ("cp.async.mbarrier.arrive.shared.b32 [%r1];", "not supported"),
        ("cp.async.bulk.commit_group;", "unknown modifier .bulk"),
        ("cvt.rn.satfinite.f16.f64 %r1, %rd1;", "satfinite.f16.f64: not supported"),
        ("cvt.pack.u16.s32 %r1, %r1, %r1;", "cvt.pack.u16.s32: not supported"),
        (
            "vabsdiff4.u32.u32.u32.min %r1, %r1, %r1, %r1;",
            "vabsdiff4.u32.u32.u32.min: not supported",
        ),
        ("setp.lt.f16x2 %p1, %r1, %r2;", "packed types have two results"),
        ("fence.proxy.async;", "fence.proxy.async: not supported"),
        ("prefetch.shared.L2 [%rd1];", "prefetch: unknown modifier .shared"),
        ("discard.global.L2 [%rd1];", "wrong number of operands"),
        ("createpolicy.surprise.b64 %rd1, 1.0;", "unknown modifier .surprise"),
        ("ld.global.b32 %r1, [%rd1, {%r1}];", "ld.global.b32: this form of address"),
        (
            "tex.cube.v4.f32.f32 {%r1,%r1,%r1,%r1}, [%rd1, {%r1,%r1,%r1,%r1}];",
            "tex.cube.v4.f32.f32: not supported",
        ),
        (
            "tex.level.2d.v4.f32.f32 {%r1,%r1,%r1,%r1}, [%rd1, {%r1,%r1}], %r1;",
            "tex.level.2d.v4.f32.f32: ",
        ),
        (
            "tex.2d.v2.f16x2.f32 {%r1,%r1}, [%rd1, {%r1,%r1}];",
            "tex: unknown modifier .v2",
        ),
        (
            "tex.2d.v4.f32.f32 {%r1,%r1,%r1,%r1}, [%rd1, {%r1}];",
            "wrong number of coordinates",
        ),
        (
            "tex.2d.v4.f32.f32 {%r1,%r1,%r1,%r1}, [nothing, {%r1,%r1}];",
            "not supported but with an object in a register",
        ),
        ("tex.1d.v4.f32.s32 {%r1,%r1,%r1,%r1}, [%r1, {%r1}];", "differ in size"),
        (
            "tld4.r.2d.v4.f32.f32 {%r1,%r1,%r1,%r1}, [%rd1, {%r1,%r1}];",
            "tld4.r.2d.v4.f32.f32: this form of address",
        ),
        ("sured.b.add.2d.u32.trap [%rd1, {%r1,%r1}], %r1;", "this form of address"),
        ("sust.p.2d.b32.trap [%rd1, {%r1,%r1}], {%r1};", "sust.p.2d.b32.trap: not supported"),
        ("suld.b.2d.b32 {%r1}, [%rd1, {%r1,%r1}];", "suld.b.2d.b32: not supported"),
        ("suld.b.2d.f32.trap {%r1}, [%rd1, {%r1,%r1}];", "not supported"),
        ("suld.b.2d.v2.b32.trap {%r1}, [%rd1, {%r1,%r1}];", "wrong number of vector elements"),
        ("txq.channel_order.b32 %r1, [%rd1];", "unknown modifier .channel_order"),
    ],
)
def test_what_is_unknown_is_refused_by_name(body: str, message: str) -> None:
    registers = ".reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .pred %p<2>;"
    text = f"{HEADER}.visible .entry k() {{\n{registers}\n{body}\nret; }}"
    with pytest.raises(PtxError) as caught:
        Kernel(text, "k")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".func f(); .global .u64 v = f;", "the address of f is not a constant"),
        (".entry k() { .reg .b64 %d; mov.u64 %d, f; } .func f();", "f: a function without a body"),
        (".func f() { ret; } .global .u32 v = f;", "v: an address needs 64-bit elements"),
    ],
)
def test_addresses_of_functions_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(PtxError) as caught:
        Kernel(HEADER + text, "k")
    assert message in str(caught.value)


@pytest.mark.parametrize("target", ["sm_90", "sm_86", "sm_100a"])
def test_text_for_a_newer_gpu_is_refused(target: str) -> None:
    text = f"{HEADER.replace('sm_80', target)}.visible .entry k() {{ ret; }}"
    with pytest.raises(PtxError, match=f"line 2: .target: {target} is newer"):
        Kernel(text, "k")
    Kernel(text.replace(target, "sm_52"), "k")


@pytest.mark.parametrize(
    "text",
    [
        "fma.f32 %f1, %f1, %f1, %f1;",
        "sqrt.rn.sat.f32 %f1, %f1;",
        "add.rn.bf16 %h1, %h1, %h1;",
        "add.relu.f16 %h1, %h1, %h1;",
        "max.sat.f16 %h1, %h1, %h1;",
        "cvt.rn.s32.f32 %r1, %f1;",
        "cvt.f32.s32 %f1, %r1;",
        "cvt.f16.f32 %h1, %f1;",
        "cvt.rn.bf16.s32 %h1, %r1;",
        "cvt.rn.tf32.f32 %r1, %f1;",
        "cvt.sat.s32.s16 %r1, %h1;",
        "mov.f16 %h1, %h1;",
        "mov.b8 %b1, %b1;",
        "mov.u32 {%h1, %h1}, %r1;",
        "mov.b32 {%h1, %h1, %h1, %h1}, %r1;",
        "mov.b32 {%b1, %b1}, %r1;",
        "ld.global.v4.b64 {%rd1, %rd1, %rd1, %rd1}, [%rd1];",
        "atom.global.add.f16 %h1, [%rd1], %h1;",
        "red.global.exch.b32 [%rd1], %r1;",
        "shfl.sync.idx.u32 %r1, %r1, %r1, %r1, %r1;",
        "add.s32 %f1, %r1, %r1;",
        "mov.u32 %f1, %r1;",
        "st.global.u32 [%rd1], %f1;",
        "cvt.rn.f32.s32 %f1, %f1;",
    ],
)
def test_forms_that_the_assembler_refuses_are_refused(text: str) -> None:
    registers = (
        ".reg .b8 %b<2>; .reg .b16 %h<2>; .reg .f32 %f<2>; .reg .b32 %r<2>; .reg .b64 %rd<2>;"
    )
    with pytest.raises(PtxError, match=r"not supported|wrong number of vector|another type"):
        Kernel(f"{HEADER}.visible .entry k() {{ {registers} {text} ret; }}", "k")
    escaped = f"{registers} {text}".replace("%", "%%")
    with pytest.raises(ValueError, match="ptxas"):
        assemble(f'__global__ void k() {{ asm volatile("{{ {escaped} }}" :: "r"(0)); }}')


def test_an_unknown_instruction_in_an_uncalled_function_is_refused() -> None:
    text = HEADER + ".func f() { frobnicate; ret; }\n.visible .entry k() { ret; }"
    with pytest.raises(PtxError, match="frobnicate"):
        Kernel(text, "k")


POINTERS = """
typedef int (*Function)(int, int);
__device__ __noinline__ int add(int x, int n) { return x + n; }
__device__ __noinline__ int one(int x) { return 1; }
__device__ int times(int x, int n);
__device__ Function table[2] = {add, times};
__device__ int (*other)(int) = one;
__device__ __noinline__ int times(int x, int n) { return table[n > 4](x, n - 1) * 2; }
extern "C" __global__ void k(int* o, int n, Function function) {
    if (n == 1) function = (Function)other;
    if (n == 2) function = (Function)(2 + (char*)add);
    if (n >= 3) function = table[1];
    *o = function(5, n);
}
"""


@pytest.mark.parametrize("n", [0, 1, 2, 6])
def test_a_call_through_a_pointer_that_cannot_be_is_an_illegal_instruction(n: int) -> None:
    error = stopped(POINTERS, "illegal_instruction", np.zeros(1, i4), i4(n), np.uint64(0))
    assert "call" in error.detail and "thread (0,0,0)" in error.detail


def test_functions_that_could_recur_through_a_pointer_run_as_long_as_they_do_not() -> None:
    out = np.zeros(1, i4)
    kernel(POINTERS).run(1, 1, [out, i4(3), np.uint64(0)])
    assert out[0] == 14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("call (r), %d, (a), nowhere;", "nowhere: no such label"),
        ("here: call (r), %d, (a), here;", "no .callprototype and no .calltargets"),
        ("call (r), %d, (a), p; p: .calltargets f;", "at a label above it"),
        ("p: .calltargets f; call (r), %d, (a), 0;", "no .callprototype and no .calltargets"),
        ("p: .callprototype (.param .b32 _) _ (); call (r), %d, (a), p;", "number of arguments"),
        ("p: .calltargets k; call (r), %d, (a), p;", "k: no such function"),
        ("p: .calltargets f; call (r), %d, (a, a), p;", "f: wrong number of arguments"),
        ("call (r), %d, (a);", "wrong number of operands"),
        ("call (r), f, (a), f;", "wrong number of operands"),
        ("p: .calltargets f; call (r), %x, (a), p;", "differ in size"),
    ],
)
def test_calls_through_pointers_of_another_form_are_refused(call: str, message: str) -> None:
    text = f"""{HEADER}.func (.param .b32 r) f(.param .b32 a) {{ ret; }}
        .entry k() {{ .reg .b64 %d; .reg .b32 %x; .param .b32 a; .param .b32 r; {call} ret; }}"""
    with pytest.raises(PtxError) as caught:
        Kernel(text, "k")
    assert message in str(caught.value)


def test_recursion_is_refused_by_name() -> None:
    text = HEADER + ".func f() { call.uni f; ret; }\n.visible .entry k() { call.uni f; ret; }"
    with pytest.raises(PtxError, match="f: recursion is not supported"):
        Kernel(text, "k")


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (".shared .b8 s[49153]; mov.u32 %r1, s;", "48 KiB of static shared memory"),
        (".local .b8 s[600000]; mov.u32 %r1, s;", "512 KiB of local memory"),
        (".reg .b64 %many<200000>;", "too many registers"),
    ],
)
def test_sizes_that_no_gpu_has_are_refused(declaration: str, message: str) -> None:
    text = f"{HEADER}.visible .entry k() {{ .reg .b32 %r<2>; {declaration} ret; }}"
    with pytest.raises(PtxError, match=message):
        Kernel(text, "k")


@pytest.mark.parametrize("text", ["", "garbage", HEADER + ".visible .entry k() {", HEADER + '"'])
def test_text_that_is_not_ptx_is_an_error(text: str) -> None:
    with pytest.raises(PtxError, match="line"):
        Kernel(text, "k")


def test_the_write_log_holds_exactly_the_bytes_written() -> None:
    out, counters = np.zeros(300, i4), np.zeros(64, u4)
    logged = kernel(
        """extern "C" __global__ void k(int* o, unsigned* c, int n) {
            __shared__ int s[64];
            int local[4];
            int i = blockIdx.x * 64 + threadIdx.x;
            s[threadIdx.x] = i; local[i % 4] = i;
            if (i < n) o[i] = s[threadIdx.x];
            if (i % 2 == 0 && i < 20) o[200 + i] = local[i % 4];
            if (i == 7) { atomicAdd(c + 9, 1u); atomicCAS(c + 20, 5u, 1u); }
        }"""
    )
    logged.run(3, 64, [out, counters, i4(130)], log_writes=True)
    first, second = logged.addresses
    expected = [(first, 520), *((first + 4 * (200 + i), 4) for i in range(0, 20, 2))]
    assert logged.written == [*expected, (second + 36, 4)]


def test_a_matrix_that_is_stored_is_in_the_write_log() -> None:
    out = np.zeros(16 * 40, f4)
    logged = kernel(
        """extern "C" __global__ void k(float* o) {
            float v = 1;
            asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.f32 [%0], "
                "{%1,%1,%1,%1,%1,%1,%1,%1}, %2;" :: "l"(o + 4), "f"(v), "r"(40));
        }"""
    )
    logged.run(1, 32, [out], log_writes=True)
    (first,) = logged.addresses
    assert logged.written == [(first + 16 + 160 * row, 64) for row in range(16)]
    assert out.sum() == 256 and np.all(out.reshape(16, 40)[:, 4:20] == 1)


def test_the_write_log_is_off_unless_asked_for() -> None:
    silent = kernel(STORE)
    silent.run(1, 32, [np.zeros(32, i4), i4(32)])
    assert silent.written == []


def test_a_launch_is_deterministic() -> None:
    source = """extern "C" __global__ void k(float* o, const float* x) {
        atomicAdd(o, x[blockIdx.x * 64 + threadIdx.x]);
    }"""
    x = np.random.default_rng(1).standard_normal(6400).astype(f4)
    sums = set()
    for _ in range(3):
        out = np.zeros(1, f4)
        run(source, "k", 100, 64, [out, x])
        sums.add(out[0].tobytes())
    assert len(sums) == 1


def test_attributes_of_a_kernel() -> None:
    loaded = kernel(
        """struct S { char c; double d; };
        extern "C" __global__ void k(S s, char b, int* o) {
            __shared__ double big[100];
            big[threadIdx.x] = s.d + b; __syncthreads(); *o = (int)big[99];
        }"""
    )
    found = loaded.attributes()
    assert found["shared"] == 800 and found["local"] == 0
    assert found["params"] == 32 and found["threads"] == 1024
