"""Programs that load what the emulated linker made, changed as a tool would change a cubin.

python -m tests.emu.cubin_cases CASE FOLDER
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.cubin_file import Cubin
from tests.emu.driver_cases_link import linked
from tests.emu.driver_lib import download, ok, refuses, start
from tests.emu.fatbins import container, entry
from tests.emu.program_lib import HEAD

SLOTS, VALUES = ".rela.nv.constant4", ".rela.nv.global.init"
ABSOLUTE = 0xFFF1  # SHN_ABS
PTX = (
    HEAD
    + """
.visible .global .align 4 .u32 counter = 5;
.global .align 64 .u64 hidden = 7;
.visible .global .align 16 .u32 zeros[3];
.visible .const .align 4 .u32 table[2] = {11, 22};
.visible .const .align 8 .u64 home = zeros;
.visible .global .align 8 .u64 chain[3] = {counter, 9, generic(table)+4};
.visible .entry bump() {
    .reg .b32 %r<2>; .reg .b64 %d<2>;
    ld.global.u32 %r1, [counter]; add.u32 %r1, %r1, 1; st.global.u32 [counter], %r1;
    ld.global.u64 %d1, [hidden]; add.u64 %d1, %d1, 1; st.global.u64 [hidden], %d1; ret;
}
.visible .entry addresses(.param .u64 out) {
    .reg .b64 %d<6>;
    ld.param.u64 %d1, [out];
    mov.u64 %d2, counter; st.global.u64 [%d1], %d2;
    mov.u64 %d3, zeros; st.global.u64 [%d1+8], %d3;
    ld.const.u64 %d4, [home]; st.global.u64 [%d1+16], %d4;
    cvta.const.u64 %d5, table; st.global.u64 [%d1+24], %d5; ret;
}
"""
).encode() + b"\0"
FUNCTIONS = (
    HEAD
    + """
.func (.param .b32 out) twice(.param .b32 in) {
    .reg .b32 %r; ld.param.b32 %r, [in]; add.u32 %r, %r, %r; st.param.b32 [out], %r; ret;
}
.visible .func unused() { ret; }
.visible .global .align 8 .u64 table[4] = {twice, 9, unused, addresses};
.visible .const .align 8 .u64 home = unused;
.visible .global .align 8 .u64 start = table;
.visible .entry addresses(.param .u64 out) {
    .reg .b64 %d<6>;
    ld.param.u64 %d1, [out];
    mov.u64 %d2, twice; st.global.u64 [%d1], %d2;
    mov.u64 %d3, unused; st.global.u64 [%d1+8], %d3;
    mov.u64 %d4, addresses; st.global.u64 [%d1+16], %d4;
    ld.const.u64 %d5, [home]; st.global.u64 [%d1+24], %d5; ret;
}
"""
).encode() + b"\0"
CASES: dict[str, Callable[[Path], None]] = {}


def case(body: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[body.__name__] = body
    return body


def place(module: Any, name: bytes) -> int:
    return int(ok(cu.cuModuleGetGlobal(module, name))[0])


def run(module: Any, name: bytes, *arguments: int) -> None:
    kernel = ok(cu.cuModuleGetFunction(module, name))
    values = (arguments, (ctypes.c_uint64,) * len(arguments)) if arguments else 0
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, values, 0))
    ok(cu.cuCtxSynchronize())


def addresses(module: Any) -> list[int]:
    """The four addresses that the kernel of that name sees."""
    out = int(ok(cu.cuMemAlloc(32)))
    run(module, b"addresses", out)
    return [int(address) for address in download(out, 4, np.uint64)]


def memory(*values: int) -> int:
    """Memory of the program's own."""
    data = np.array(values, np.uint32)
    address = int(ok(cu.cuMemAlloc(4096))) + 1024
    ok(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
    return address


CHECKPOINT = """
import sys
from cuda.bindings import driver as cu
lock = cu.CUcheckpointLockArgs()
lock.timeoutMs = 5000
for verb, arguments in (("Lock", lock), ("Checkpoint", None), ("Restore", None), ("Unlock", None)):
    result = getattr(cu, "cuCheckpointProcess" + verb)(int(sys.argv[1]), arguments)[0]
    assert int(result) == 0, (verb, result)
"""


def checkpoint() -> None:
    """Take a checkpoint of this process, and put it back."""
    subprocess.run([sys.executable, "-c", CHECKPOINT, str(os.getpid())], check=True)


@case
def the_tables_are_those_of_a_cubin(folder: Path) -> None:
    start()
    code = linked(PTX)
    (folder / "cubin").write_bytes(code)
    cubin = Cubin(code)
    assert len(code) == cubin.table + 64 * cubin.count
    assert cubin.variables() == {"counter", "hidden", "zeros", "table", "home", "chain"}
    homes = {
        "counter": ".nv.global.init",
        "hidden": ".nv.global.init",
        "chain": ".nv.global.init",
        "zeros": ".nv.global",
        "table": ".nv.constant3",
        "home": ".nv.constant3",
    }
    numbers = {name: cubin.symbol(name)[0] for name in homes}
    for name, section_name in homes.items():
        _, info, _, section, value, size = cubin.symbol(name)[2]
        assert section == cubin.find(section_name)
        assert info >> 4 == (0 if name == "hidden" else 1)
        align = {"hidden": 64, "zeros": 16, "counter": 4, "table": 4}.get(name, 8)
        assert value % align == 0 and cubin.section(section)[8] % align == 0
        assert value + size <= cubin.section(section)[5]
    assert cubin.section(cubin.find(".nv.global"))[1] == 8  # SHT_NOBITS
    hidden = cubin.symbol("hidden")[2][4]
    assert cubin.contents(".nv.global.init")[hidden : hidden + 8] == struct.pack("<Q", 7)
    for kernel in ("bump", "addresses"):
        assert cubin.section(cubin.find(f".text.{kernel}"))[2] & 4  # SHF_EXECINSTR
    globals_ = ["counter", "hidden", "zeros", "chain"]
    assert cubin.relocations(SLOTS) == [
        (8 * slot, 2, numbers[name], 0) for slot, name in enumerate(globals_)
    ]
    assert struct.unpack("<4I", cubin.contents(".emu.slots")) == tuple(
        numbers[name] for name in globals_
    )
    chain, home = cubin.symbol("chain")[2][4], cubin.symbol("home")[2][4]
    assert cubin.relocations(VALUES) == [
        (chain, 4, numbers["counter"], 0),
        (chain + 16, 4, numbers["table"], 4),
    ]
    assert cubin.relocations(".rela.nv.constant3") == [(home, 4, numbers["zeros"], 0)]
    for table, of in ((SLOTS, ".nv.constant4"), (VALUES, ".nv.global.init")):
        header = cubin.section(cubin.find(table))
        assert header[1] == 4  # SHT_RELA
        assert header[6:8] == (cubin.find(".symtab"), cubin.find(of))


@case
def as_it_was_made_everything_is_the_drivers(folder: Path) -> None:
    start()
    module = ok(cu.cuModuleLoadData(linked(PTX)))
    counter, zeros, table = (place(module, name) for name in (b"counter", b"zeros", b"table"))
    assert addresses(module) == [counter, zeros, zeros, table]
    assert list(download(place(module, b"chain"), 3, np.uint64)) == [counter, 9, table + 4]
    run(module, b"bump")
    assert download(counter, 1)[0] == 6
    assert download(place(module, b"hidden"), 1, np.uint64)[0] == 8


def loads(code: bytes, folder: Path) -> list[Any]:
    """Load the same code by every way into a module."""
    file = folder / "changed.cubin"
    file.write_bytes(code)
    binary = container(
        entry(PTX, "none", architecture=80), entry(code, "zstd", kind=2, architecture=80)
    )
    libraries = (
        ok(cu.cuLibraryLoadData(code, [], [], 0, [], [], 0)),
        ok(cu.cuLibraryLoadFromFile(bytes(file), [], [], 0, [], [], 0)),
    )
    return [
        ok(cu.cuModuleLoadData(code)),
        ok(cu.cuModuleLoad(bytes(file))),
        ok(cu.cuModuleLoadFatBinary(binary)),
        *(ok(cu.cuLibraryGetModule(library)) for library in libraries),
    ]


@case
def kernels_use_the_address_in_a_slot_without_a_relocation(folder: Path) -> None:
    start()
    cubin = Cubin(linked(PTX))
    own, other = memory(100), memory(1, 2, 3)
    cubin.resolve("counter", own)
    cubin.resolve("zeros", other)
    for number, module in enumerate(loads(bytes(cubin.code), folder)):
        counter, zeros = place(module, b"counter"), place(module, b"zeros")
        assert len({counter, zeros, own, other}) == 4
        # Addresses in first values are those of the driver's copies.
        assert addresses(module) == [own, other, zeros, place(module, b"table")]
        assert download(place(module, b"chain"), 1, np.uint64)[0] == counter
        run(module, b"bump")
        assert download(own, 1)[0] == 101 + number
        assert download(counter, 1)[0] == 5
        assert download(place(module, b"hidden"), 1, np.uint64)[0] == 8
        assert not download(zeros, 3).any()


@case
def every_slot_may_be_resolved(folder: Path) -> None:
    start()
    cubin = Cubin(linked(PTX))
    own = memory(*range(64))
    for number, name in enumerate(("counter", "hidden", "zeros", "chain")):
        cubin.resolve(name, own + 8 * number)
    assert cubin.relocations(SLOTS) == []
    module = ok(cu.cuModuleLoadData(bytes(cubin.code)))
    assert addresses(module)[:2] == [own, own + 16]
    run(module, b"bump")
    assert list(download(own, 4)) == [1, 1, 3, 3]


@case
def first_values_are_the_bytes_of_the_section(folder: Path) -> None:
    start()
    cubin = Cubin(linked(PTX))
    init = ".nv.global.init"
    cubin.put(init, cubin.symbol("counter")[2][4], struct.pack("<I", 77))
    chain = cubin.symbol("chain")[2][4]
    (first, second) = cubin.relocations(VALUES)
    assert first[0] == chain
    cubin.put(init, chain, struct.pack("<Q", 0x123456789))
    cubin.set_relocations(VALUES, [second])
    cubin.put(".nv.constant3", cubin.symbol("home")[2][4], struct.pack("<Q", 0xABC))
    cubin.set_relocations(".rela.nv.constant3", [])
    cubin.put(".nv.constant3", cubin.symbol("table")[2][4], struct.pack("<2I", 33, 44))
    module = ok(cu.cuModuleLoadData(bytes(cubin.code)))
    table = place(module, b"table")
    assert download(place(module, b"counter"), 1)[0] == 77
    assert list(download(place(module, b"chain"), 3, np.uint64)) == [0x123456789, 9, table + 4]
    assert addresses(module)[2] == 0xABC
    assert list(download(table, 2)) == [33, 44]


@case
def images_that_cannot_be_resolved_are_refused(folder: Path) -> None:
    start()
    code = linked(PTX)

    def refused(change: Callable[[Cubin], None], name: str = "INVALID_IMAGE") -> None:
        cubin = Cubin(code)
        change(cubin)
        image = bytes(cubin.code)
        refuses(cu.cuModuleLoadData(image), name)
        refuses(cu.cuLibraryLoadData(image, [], [], 0, [], [], 0), name)
        binary = container(entry(image, "none", kind=2, architecture=80))
        refuses(cu.cuModuleLoadData(binary), name)

    def first(table: str, **fields: int) -> Callable[[Cubin], None]:
        def change(cubin: Cubin) -> None:
            ((offset, kind, number, addend), *rest) = cubin.relocations(table)
            values = {"offset": offset, "kind": kind, "number": number, "addend": addend} | fields
            offset, kind, number, addend = values.values()
            cubin.set_relocations(table, [(offset, kind, number, addend), *rest])

        return change

    def section(name: str, **fields: int) -> Callable[[Cubin], None]:
        return lambda cubin: cubin.set_section(cubin.find(name), **fields)

    def absolute(cubin: Cubin) -> None:
        struct.pack_into("<H", cubin.code, cubin.symbol("counter")[1] + 6, ABSOLUTE)

    def no_slots(cubin: Cubin) -> None:
        for name in (".emu.slots", ".nv.constant4", SLOTS):
            cubin.set_section(cubin.find(name), size=0)

    def nameless(cubin: Cubin) -> None:
        cubin.code[cubin.symbol("zeros")[1] + 4] = 0

    for table in (SLOTS, VALUES, ".rela.nv.constant3"):
        refused(first(table, kind=0))
        refused(first(table, kind=9))
        refused(first(table, number=0))
        refused(first(table, number=1 << 20))
        refused(first(table, offset=1 << 40))
        refused(first(table, offset=(1 << 64) - 4))
        refused(section(table, offset=1 << 40))
        refused(section(table, size=len(code)))
        refused(section(table, link=0))
    refused(first(SLOTS, number=Cubin(code).symbol("zeros")[0]))
    refused(first(SLOTS, addend=8))
    refused(section(".nv.global.init", offset=len(code)))
    refused(section(".nv.constant4", size=8))
    refused(section(".emu.slots", size=4))
    refused(section(".emu.slots", type=8))
    for name in (".nv.constant4", ".nv.global.init"):
        refused(section(name, type=0, offset=1 << 40))
    refused(section(".nv.global", size=4))
    refused(section(".symtab", type=1))
    refused(section(".symtab", size=48))
    refused(no_slots)
    refused(absolute)
    refused(nameless)
    refused(section(".emu.ptx", size=0), "NO_BINARY_FOR_GPU")
    refused(lambda cubin: cubin.put(".emu.ptx", 0, b"?"), "INVALID_PTX")
    # The driver refuses a header alone, and one whose tables are nowhere.
    refuses(cu.cuModuleLoadData(code[:64]), "NO_BINARY_FOR_GPU")
    for start_of_table in (1 << 20, 1 << 40, (1 << 64) - 64):
        far = code[:40] + struct.pack("<Q", start_of_table) + code[48:]
        refuses(cu.cuModuleLoadData(far), "NO_BINARY_FOR_GPU")
    ok(cu.cuModuleLoadData(code))


@case
def a_checkpoint_keeps_where_the_variables_are(folder: Path) -> None:
    start()
    state = ok(cu.cuLinkCreate(0, [], []))
    ok(cu.cuLinkAddData(state, cu.CUjitInputType.CU_JIT_INPUT_PTX, PTX, len(PTX), b"", 0, [], []))
    cubin = Cubin(linked(PTX))
    own = memory(100)
    cubin.resolve("counter", own)
    cubin.put(".nv.global.init", cubin.symbol("hidden")[2][4], struct.pack("<Q", 70))
    code = bytes(cubin.code)
    modules = [*loads(code, folder), ok(cu.cuModuleLoadData(linked(PTX)))]
    late = ok(cu.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    counters = [place(module, b"counter") for module in modules]
    for number in range(1, 4):
        for module in modules:
            run(module, b"bump")
        checkpoint()
        assert download(own, 1)[0] == 100 + number * (len(modules) - 1)
        assert [place(module, b"counter") for module in modules] == counters
        assert [download(at, 1)[0] for at in counters] == [5] * (len(modules) - 1) + [5 + number]
        hidden = [download(place(module, b"hidden"), 1, np.uint64)[0] for module in modules]
        assert hidden == [70 + number] * (len(modules) - 1) + [7 + number]
        assert addresses(modules[0])[0] == own
    # A library that no context had a module of, and a state of the linker.
    before = download(own, 1)[0]
    module = ok(cu.cuLibraryGetModule(late))
    run(module, b"bump")
    assert download(own, 1)[0] == before + 1
    assert download(place(module, b"hidden"), 1, np.uint64)[0] == 71
    image, size = ok(cu.cuLinkComplete(state))
    assert ctypes.string_at(image, size) == linked(PTX)
    ok(cu.cuLinkDestroy(state))


@case
def functions_are_symbols_whose_addresses_are_relocations(folder: Path) -> None:
    start()
    code = linked(FUNCTIONS)
    (folder / "cubin").write_bytes(code)
    cubin = Cubin(code)
    number = {}
    for name, other in (("twice", 0), ("unused", 0), ("addresses", 0x10)):
        number[name], _, symbol = cubin.symbol(name)
        home = cubin.find(f".text.{name}")
        assert symbol[1:4] == (0x12, other, home)  # STB_GLOBAL, STT_FUNC
        assert cubin.section(home)[2] & 4  # SHF_EXECINSTR
    table, first = cubin.symbol("table")[2][4], cubin.symbol("start")[2][4]
    assert cubin.relocations(VALUES) == [
        (table, 2, number["twice"], 0),
        (table + 16, 2, number["unused"], 0),
        (table + 24, 35, number["addresses"], 0),
        (first, 4, cubin.symbol("table")[0], 0),
    ]
    assert cubin.relocations(".rela.nv.constant3") == [(0, 2, number["unused"], 0)]


def functions(module: Any) -> list[int]:
    """Addresses of twice, unused and the kernel, which are the same everywhere in the module."""
    twice, unused, kernel, home = addresses(module)
    assert list(download(place(module, b"table"), 4, np.uint64)) == [twice, 9, unused, kernel]
    assert home == unused
    return [twice, unused, kernel]


@case
def functions_have_other_addresses_in_each_module(folder: Path) -> None:
    start()
    code = linked(FUNCTIONS)
    modules = [*loads(code, folder), ok(cu.cuModuleLoadData(FUNCTIONS))]
    ok(cu.cuModuleUnload(modules[0]))
    modules[0] = ok(cu.cuModuleLoadData(code))
    found = [address for module in modules for address in functions(module)]
    assert len(set(found)) == len(found)
    assert all(address % 8 == 0 for address in found)
    for address in found:
        refuses(cu.cuMemcpyDtoD(memory(1), address, 4), "INVALID_VALUE")


CALLS = (
    FUNCTIONS.rstrip(b"\0")
    + b"""
.func (.param .b32 out) minus(.param .b32 in) {
    .reg .b32 %r; ld.param.b32 %r, [in]; neg.s32 %r, %r; st.param.b32 [out], %r; ret;
}
.visible .global .align 8 .u64 calls[2] = {twice, minus};
.visible .entry call_both(.param .u64 out) {
    .reg .b64 %d<4>; .reg .b32 %r<4>; .param .b32 in; .param .b32 result;
    one: .callprototype (.param .b32 _) _ (.param .b32 _);
    ld.param.u64 %d1, [out];
    st.param.b32 [in], 21;
    ld.global.u64 %d2, [calls]; call (result), %d2, (in), one;
    ld.param.b32 %r2, [result]; st.global.b32 [%d1], %r2;
    ld.global.u64 %d3, [calls+8]; call (result), %d3, (in), one;
    ld.param.b32 %r3, [result]; st.global.b32 [%d1+4], %r3; ret;
}
\0"""
)


@case
def kernels_call_the_functions_whose_addresses_a_variable_holds(folder: Path) -> None:
    start()
    out = memory(0, 0)

    def both(module: Any) -> list[int]:
        run(module, b"call_both", out)
        return [int(value) for value in download(out, 2, np.int32)]

    code = linked(CALLS)
    modules = [*loads(code, folder), ok(cu.cuModuleLoadData(CALLS))]
    assert [both(module) for module in modules] == [[42, -21]] * len(modules)
    checkpoint()
    assert [both(module) for module in modules] == [[42, -21]] * len(modules)
    cubin = Cubin(code)
    calls = cubin.symbol("calls")[2][4]
    *others, twice, minus = cubin.relocations(VALUES)
    assert (twice[0], minus[0]) == (calls, calls + 8)
    cubin.set_relocations(VALUES, [*others, (*twice[:2], *minus[2:]), (*minus[:2], *twice[2:])])
    assert both(ok(cu.cuModuleLoadData(bytes(cubin.code)))) == [-21, 42]
    # What a function is in one module is none in another.
    source, target = (place(module, b"calls") for module in modules[-2:])
    ok(cu.cuMemcpyDtoD(target, source, 16))
    assert both(modules[-2]) == [42, -21]
    kernel = ok(cu.cuModuleGetFunction(modules[-1], b"call_both"))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((out,), (ctypes.c_uint64,)), 0))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_INSTRUCTION")


@case
def a_relocation_to_a_function_may_be_changed(folder: Path) -> None:
    start()
    code = linked(FUNCTIONS)
    cubin = Cubin(code)
    twice, unused, kernel, first = cubin.relocations(VALUES)
    cubin.put(VALUES[5:], cubin.symbol("table")[2][4], struct.pack("<Q", 0x123456789))
    cubin.set_relocations(VALUES, [(*unused[:2], twice[2], 4), kernel, first])
    module = ok(cu.cuModuleLoadData(bytes(cubin.code)))
    values = [int(value) for value in download(place(module, b"table"), 4, np.uint64)]
    own = addresses(module)
    assert values == [0x123456789, 9, own[0] + 4, own[2]]
    number = cubin.symbol("table")[0]
    for entries in (
        [(*twice[:1], 4, *twice[2:])],
        [(*twice[:1], 35, *twice[2:])],
        [(*kernel[:1], 2, *kernel[2:])],
        [(*twice[:2], number, 0)],
    ):
        cubin = Cubin(code)
        cubin.set_relocations(VALUES, entries)
        refuses(cu.cuModuleLoadData(bytes(cubin.code)), "INVALID_IMAGE")


@case
def a_checkpoint_keeps_the_addresses_of_functions(folder: Path) -> None:
    start()
    modules = [ok(cu.cuModuleLoadData(code)) for code in (FUNCTIONS, linked(FUNCTIONS))]
    library = ok(cu.cuLibraryLoadData(FUNCTIONS, [], [], 0, [], [], 0))
    modules.append(ok(cu.cuLibraryGetModule(library)))
    before = [functions(module) for module in modules]
    checkpoint()
    assert [functions(module) for module in modules] == before
    assert functions(ok(cu.cuModuleLoadData(FUNCTIONS))) not in before


def main() -> None:
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("passed")


if __name__ == "__main__":
    main()
