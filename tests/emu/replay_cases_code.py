"""Round trips of modules, libraries, their variables, and what is set of functions."""

from __future__ import annotations

from tests.emu.replay_cases import ANY, ATTRIBUTE, Case

_CARVEOUT = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"
_PREFER_L1 = "cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_L1"

# Code that calls functions by their addresses in a variable, as NCCL does. Linked, they are such:
# in code that is compiled as a whole they are numbers in a table of the kernel.
_FUNCTIONS = """
FUNCTIONS = b'''
.version 7.0
.target sm_70
.address_size 64
.visible .func (.param .b64 out) thrice(.param .b64 x) {
    .reg .b64 %rd<3>; ld.param.u64 %rd1, [x]; mul.lo.u64 %rd2, %rd1, 3;
    st.param.b64 [out], %rd2; ret;
}
.visible .func (.param .b64 out) plus(.param .b64 x) {
    .reg .b64 %rd<3>; ld.param.u64 %rd1, [x]; add.u64 %rd2, %rd1, 5;
    st.param.b64 [out], %rd2; ret;
}
.visible .global .align 8 .u64 rows[4] = {1, thrice, 2, plus};
.visible .global .align 8 .u64 where = rows;
.visible .entry use(.param .u64 p, .param .u64 row, .param .u64 x) {
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [row]; ld.param.u64 %rd3, [x];
    ld.global.u64 %rd4, [where]; shl.b64 %rd5, %rd2, 4; add.u64 %rd6, %rd4, %rd5;
    ld.global.u64 %rd7, [%rd6]; add.u64 %rd7, %rd7, 10; st.global.u64 [%rd6], %rd7;
    ld.global.u64 %rd8, [%rd6+8];
    { .param .b64 value; .param .b64 result;
    st.param.b64 [value], %rd3;
    form: .callprototype (.param .b64 _) _ (.param .b64 _);
    call (result), %rd8, (value), form;
    ld.param.b64 %rd9, [result]; }
    st.global.u64 [%rd1], %rd9; st.global.u64 [%rd1+8], %rd7; ret;
}
.visible .entry exchange() {
    .reg .b64 %rd<3>;
    ld.global.u64 %rd1, [rows+8]; ld.global.u64 %rd2, [rows+24];
    st.global.u64 [rows+8], %rd2; st.global.u64 [rows+24], %rd1; ret;
}
''' + bytes(1)
def linked(text):
    state = ok(cu.cuLinkCreate(0, [], []))
    kind = cu.CUjitInputType.CU_JIT_INPUT_PTX
    ok(cu.cuLinkAddData(state, kind, text, len(text), b"functions", 0, [], []))
    code, size = ok(cu.cuLinkComplete(state))
    code = ctypes.string_at(int(code), size)
    ok(cu.cuLinkDestroy(state))
    return code
def used(use, row, x):
    buffer = int(ok(cu.cuMemAlloc(16)))
    run(use, 1, buffer, row, x)
    found = download(buffer, 4)
    ok(cu.cuMemFree(buffer))
    return [int(found[0]), int(found[2])]
"""

# Objects in memory of the program's lead to tables of functions among the module's variables.
_VIRTUAL = """
from cuda.bindings import nvrtc
from tests.emu.cuda_source import compile_program
program = compile_program('''
struct Base { __device__ virtual long value(long x) = 0; };
struct Thrice : Base { __device__ long value(long x) override { return 3 * x; } };
struct Plus : Base { __device__ long value(long x) override { return x + 5; } };
extern "C" __global__ void make(void* place, long which) {
    if (which) new (place) Plus; else new (place) Thrice;
}
extern "C" __global__ void ask(long* out, Base* of, long x) { out[0] = of->value(x); out[1] = 1; }
''', "compute_80", ("-rdc=true",))
_, size = nvrtc.nvrtcGetPTXSize(program)
text = b" " * size
nvrtc.nvrtcGetPTX(program, text)
"""

CODE_CASES = (
    Case(
        "virtual_functions",
        ("cuModuleLoadData",),
        f"""{_FUNCTIONS}{_VIRTUAL}
before = [ok(cu.cuModuleLoadData(linked(FUNCTIONS))) for _ in range(8)]
module = ok(cu.cuModuleLoadData(linked(text)))
make, ask = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"make", b"ask"))
places = [int(ok(cu.cuMemAlloc(16))) for _ in range(2)]
for which, place in enumerate(places):
    run(make, 1, place, which)
assert [used(ask, place, 7)[0] for place in places] == [21, 12]
for one in before:
    ok(cu.cuModuleUnload(one))
""",
        {"[used(ask, place, 7)[0] for place in places]": [21, 12]},
    ),
    Case(
        # What was loaded before it is not there the next time, so its code comes to lie elsewhere.
        # The library's variables stay the driver's.
        "addresses_of_functions",
        ("cuModuleLoadData", "cuLibraryLoadData"),
        f"""{_FUNCTIONS}
before = [ok(cu.cuModuleLoadData(PTX)) for _ in range(64)]
for one in before:
    run_inc = ok(cu.cuModuleGetFunction(one, b"inc"))
    assert inc_of(run_inc) == 128
module = ok(cu.cuModuleLoadData(linked(FUNCTIONS)))
library = ok(cu.cuLibraryLoadData(linked(FUNCTIONS), [], [], 0, [], [], 0))
uses = [
    ok(cu.cuModuleGetFunction(module, b"use")),
    ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"use")))),
]
assert [used(use, 0, 7) for use in uses] == [[21, 11]] * 2
for one in before:
    ok(cu.cuModuleUnload(one))
other = ok(cu.cuModuleLoadData(linked(FUNCTIONS)))
run(ok(cu.cuModuleGetFunction(other, b"exchange")), 1)
other_use = ok(cu.cuModuleGetFunction(other, b"use"))
place = int(ok(cu.cuModuleGetGlobal(other, b"rows"))[0])
counted = {{}}
def results(row):
    found = [used(use, row, 7) for use in uses]
    counted[row] = counted.get(row, 0) + 10
    return [[value, count - counted[row]] for value, count in found]
""",
        {
            "results(0)": [[21, 11]] * 2,
            "results(1)": [[12, 2]] * 2,
            "[used(other_use, row, 7)[0] for row in (0, 1)]": [12, 21],
            "int(ok(cu.cuModuleGetGlobal(other, b'rows'))[0]) == place": True,
        },
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
