"""Round trips of module variables and constants of which the program has the address."""

from __future__ import annotations

from tests.emu.replay_cases import ANY, ATTRIBUTE, Case

MANAGED = """
import numpy
MANAGED = PTX.rstrip(bytes(1)) + b'''
.visible .global .attribute(.managed) .align 4 .u32 both[2] = {7, 8};
.visible .entry step() { .reg .b32 %r<5>;
    ld.global.u32 %r1, [both]; add.u32 %r2, %r1, 1; st.global.u32 [both], %r2;
    ld.global.u32 %r3, [counter]; add.u32 %r4, %r3, 1; st.global.u32 [counter], %r4; ret; }
''' + bytes(1)
def seen(address):
    return numpy.ctypeslib.as_array((ctypes.c_uint32 * 2).from_address(int(address)))
"""

VARIABLE_CASES = (
    Case(
        "variables_by_address",
        ("cuModuleGetGlobal",),
        f"""
module = ok(cu.cuModuleLoadData(VARIABLES))
add, read = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"add", b"read"))
ok(cu.cuFuncSetAttribute(add, {ATTRIBUTE}, 4096))
counter, table = (int(ok(cu.cuModuleGetGlobal(module, name))[0]) for name in (b"counter", b"table"))
assert [value_of(counter), value_of(table)] == [5, 11], "first values"
run(add, 2)
other = ok(cu.cuModuleLoadData(VARIABLES))
read_other = ok(cu.cuModuleGetFunction(other, b"read"))
ok(cu.cuMemsetD32(table, 33, 1))
inc = function(b"inc")
def next_counter():
    run(add, 1)
    ok(launch_inc(inc, counter, 1))
    found = read_by(read)[0]
    ok(cu.cuMemsetD32(counter, found - 2, 1))
    return found
def next_constant():
    ok(launch_inc(inc, table, 2))
    found = [read_by(read)[1], *(int(v) for v in download(table, 2))]
    ok(cu.cuMemcpyHtoD(table, (ctypes.c_uint32 * 2)(33, 22), 8))
    return found
""",
        {
            "[read_by(read), read_by(read_other)]": [[7, 33], [5, 11]],
            "[value_of(counter), value_of(table)]": [7, 33],
            "next_counter()": 9,
            "next_constant()": [34, 34, 23],
            "same(ok(cu.cuModuleGetGlobal(module, b'counter'))[0], counter)": True,
            "same(ok(cu.cuModuleGetGlobal(module, b'table'))[0], table)": True,
            "ok(cu.cuModuleGetGlobal(module, b'counter'))[1]": 4,
            f"ok(cu.cuFuncGetAttribute({ATTRIBUTE}, add))": 4096,
            "same(ok(cu.cuModuleGetFunction(module, b'add')), add)": True,
            "same(ok(cu.cuFuncGetModule(add)), module)": True,
        },
        {"name(cu.cuModuleUnload(module))": "CUDA_SUCCESS", "read_by(read_other)": [5, 11]},
    ),
    Case(
        "variables_of_libraries_by_address",
        ("cuLibraryGetGlobal",),
        """
library = ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0))
kernels = [ok(cu.cuLibraryGetKernel(library, name)) for name in (b"add", b"read")]
early = ok(cu.cuKernelGetFunction(kernels[0]))
counter, table = (
    int(ok(cu.cuLibraryGetGlobal(library, name))[0]) for name in (b"counter", b"table")
)
run(early, 1)
run(cu.CUfunction(int(kernels[0])), 2)
read = ok(cu.cuKernelGetFunction(kernels[1]))
module = ok(cu.cuLibraryGetModule(library))
""",
        {
            "[read_by(read), value_of(counter), value_of(table)]": [[8, 11], 8, 11],
            "read_by(cu.CUfunction(int(kernels[1])))": [8, 11],
            "same(ok(cu.cuLibraryGetGlobal(library, b'counter'))[0], counter)": True,
            "same(ok(cu.cuModuleGetGlobal(module, b'counter'))[0], counter)": True,
            "same(ok(cu.cuModuleGetGlobal(module, b'table'))[0], table)": True,
            "same(ok(cu.cuKernelGetFunction(kernels[0])), early)": True,
        },
        {"name(cu.cuLibraryUnload(library))": "CUDA_SUCCESS"},
    ),
    Case(
        "managed_variables",
        ("cuLibraryGetManaged",),
        f"""
{MANAGED}
library = ok(cu.cuLibraryLoadData(MANAGED, [], [], 0, [], [], 0))
module = ok(cu.cuModuleLoadData(MANAGED))
bumps = [
    ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"step")))),
    ok(cu.cuModuleGetFunction(module, b"step")),
]
both = [
    seen(ok(cu.cuLibraryGetManaged(library, b"both"))[0]),
    seen(ok(cu.cuModuleGetGlobal(module, b"both"))[0]),
]
counters = [int(ok(call(of, b"counter"))[0])
    for call, of in ((cu.cuLibraryGetGlobal, library), (cu.cuModuleGetGlobal, module))]
def next_of(i):
    run(bumps[i], 2)
    both[i][1] += 5
    found = [int(v) for v in both[i]]
    both[i][:] = (7, 8)
    run(bumps[i], 1)
    both[i][0] -= 1
    return found
def told(address):
    kinds = [cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
             cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    base, size = ok(cu.cuMemGetAddressRange(address + 4))
    return [*ok(cu.cuPointerGetAttributes(2, kinds, address)), int(base) == address, size]
""",
        {
            "next_of(0)": [9, 13],
            "next_of(1)": [9, 13],
            "[told(one.ctypes.data) for one in both]": [[1, 8, True, 8]] * 2,
            "[same(ok(call(of, b'both'))[0], both[i].ctypes.data) for i, (call, of) in enumerate("
            "((cu.cuLibraryGetGlobal, library), (cu.cuModuleGetGlobal, module)))]": [True, True],
            "name(cu.cuLibraryGetManaged(library, b'counter'))": "NOT_FOUND",
            "name(cu.cuMemFree(both[0].ctypes.data))": "INVALID_VALUE",
        },
        {
            "[value_of(counter) for counter in counters]": ANY,
            "name(cu.cuLibraryUnload(library))": "CUDA_SUCCESS",
            "name(cu.cuModuleUnload(module))": "CUDA_SUCCESS",
        },
    ),
    Case(
        "managed_variables_whose_context_has_ended",
        ("cuLibraryGetManaged",),
        f"""
{MANAGED}
ok(cu.cuCtxSetCurrent(0))
first = ok(cu.cuCtxCreate(None, 0, device))
library = ok(cu.cuLibraryLoadData(MANAGED, [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"step"))
both = seen(ok(cu.cuLibraryGetManaged(library, b"both"))[0])
def bumped():
    run(cu.CUfunction(int(kernel)), 1)
    return int(both[0])
assert bumped() == 8
ok(cu.cuCtxDestroy(first))
both[0] += 12
""",
        {
            "list(map(int, both))": [20, 8],
        },
        {
            "name(cu.cuCtxSetCurrent(ok(cu.cuCtxCreate(None, 0, device))))": "CUDA_SUCCESS",
            "bumped()": 21,
            "same(ok(cu.cuLibraryGetManaged(library, b'both'))[0], both.ctypes.data)": True,
            "name(cu.cuLibraryUnload(library))": "CUDA_SUCCESS",
        },
    ),
    Case(
        "managed_variables_of_a_library_loaded_without_a_context",
        ("cuLibraryGetManaged",),
        f"""
{MANAGED}
primary = ok(cu.cuCtxGetCurrent())
ok(cu.cuCtxSetCurrent(0))
libraries = [ok(cu.cuLibraryLoadData(MANAGED, [], [], 0, [], [], 0)) for _ in range(4)]
kernels = [ok(cu.cuLibraryGetKernel(library, b"step")) for library in libraries]
early = seen(ok(cu.cuLibraryGetManaged(libraries[3], b"both"))[0])
assert list(early) == [7, 8] and not int(ok(cu.cuCtxGetCurrent()))
ok(cu.cuCtxSetCurrent(primary))
steps = [cu.CUfunction(int(kernels[0])), ok(cu.cuKernelGetFunction(kernels[1]))]
run(steps[0], 1)
run(steps[1], 1)
both = [seen(ok(cu.cuLibraryGetManaged(library, b"both"))[0]) for library in libraries]
assert both[3].ctypes.data == early.ctypes.data
for kernel in kernels[2:]:
    steps.append(cu.CUfunction(int(kernel)))
    run(steps[-1], 1)
def next_of(i):
    both[i][1] += 5
    run(steps[i], 1)
    found = [int(v) for v in both[i]]
    both[i][:] = (7, 8)
    return found
for i in range(4):
    next_of(i)
""",
        {
            "[next_of(i) for i in range(4)]": [[8, 13]] * 4,
            "[same(ok(cu.cuLibraryGetManaged(library, b'both'))[0], one.ctypes.data)"
            " for library, one in zip(libraries, both)]": [True] * 4,
        },
        {"[name(cu.cuLibraryUnload(library)) for library in libraries]": ["CUDA_SUCCESS"] * 4},
    ),
    Case(
        "constants_set_by_a_librarys_module",
        ("cuModuleGetGlobal",),
        """
library = ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0))
read = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"read"))))
before = read_by(read)
table = int(ok(cu.cuModuleGetGlobal(ok(cu.cuLibraryGetModule(library)), b"table"))[0])
ok(cu.cuMemsetD32(table, 33, 1))
""",
        {"before": [5, 11], "read_by(read)": [5, 33], "value_of(table)": 33},
    ),
    Case(
        "variables_that_point_to_others",
        ("cuModuleGetGlobal",),
        """
POINTERS = b'''
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 state[8] = {1, 2, 3};
.visible .global .align 8 .u64 self = generic(state);
.visible .const .align 8 .u64 fixed = generic(state);
.visible .entry step() {
    .reg .b64 %rd<5>; .reg .b32 %r<5>;
    ld.global.u64 %rd1, [self];
    ld.u32 %r1, [%rd1+4]; add.u32 %r2, %r1, 10; st.u32 [%rd1+4], %r2;
    ld.const.u64 %rd3, [fixed];
    ld.u32 %r3, [%rd3+8]; add.u32 %r4, %r3, 100; st.u32 [%rd3+8], %r4;
    ret;
}
''' + bytes(1)
module = ok(cu.cuModuleLoadDataEx(POINTERS, 0, [], []))
step = ok(cu.cuModuleGetFunction(module, b"step"))
state, itself = (int(ok(cu.cuModuleGetGlobal(module, name))[0]) for name in (b"state", b"self"))
run(step, 1)
def pointer():
    low, high = (int(v) for v in download(itself, 2))
    return low | high << 32
def next_step():
    run(step, 1)
    found = [int(v) for v in download(state, 3)]
    ok(cu.cuMemcpyHtoD(state, (ctypes.c_uint32 * 3)(1, 12, 103), 12))
    return found
""",
        {
            "[int(v) for v in download(state, 4)]": [1, 12, 103, 0],
            "pointer() == state": True,
            "next_step()": [1, 22, 203],
        },
    ),
    Case(
        "variables_of_more_bytes_than_are_read_at_once",
        ("cuLibraryLoadData",),
        """
LARGE = b'''
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .b8 first[3145728];
.visible .global .align 4 .b8 second[3145728];
.visible .global .align 4 .b8 third[5242880];
.visible .global .align 4 .u32 last = 5;
.visible .entry mark() {
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [first]; add.u32 %r2, %r1, 1; st.global.u32 [first], %r2;
    ld.global.u32 %r1, [second+3145724]; add.u32 %r2, %r1, 2; st.global.u32 [second+3145724], %r2;
    ld.global.u32 %r1, [third+5242876]; add.u32 %r2, %r1, 3; st.global.u32 [third+5242876], %r2;
    ld.global.u32 %r1, [last]; add.u32 %r2, %r1, 4; st.global.u32 [last], %r2;
    ret;
}
.visible .entry read(.param .u64 p) {
    .reg .b64 %rd<2>; .reg .b32 %r<5>;
    ld.param.u64 %rd1, [p];
    ld.global.u32 %r1, [first]; st.global.u32 [%rd1], %r1;
    ld.global.u32 %r2, [second+3145724]; st.global.u32 [%rd1+4], %r2;
    ld.global.u32 %r3, [third+5242876]; st.global.u32 [%rd1+8], %r3;
    ld.global.u32 %r4, [last]; st.global.u32 [%rd1+12], %r4;
    ret;
}
''' + bytes(1)
library = ok(cu.cuLibraryLoadData(LARGE, [], [], 0, [], [], 0))
mark, read = (
    ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, name))))
    for name in (b"mark", b"read")
)
run(mark, 2)
found = int(ok(cu.cuMemAlloc(16)))
def values():
    run(read, 1, found)
    return [int(v) for v in download(found, 4)]
def next_values():
    run(mark, 1)
    return values()
""",
        {"values()": [2, 4, 6, 13]},
        {"next_values()": [3, 6, 9, 17]},
    ),
)
