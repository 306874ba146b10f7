"""native/modimage: how long a module's image is, and which variables are in it."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emu.cubin_file import Cubin
from tests.emu.cuda_source import compile_program
from tests.emu.fatbins import container, entry, fatbin
from tests.emu.image_reader import WRAPPER_1, WRAPPER_2, Reader, build
from tests.emu.ptx_runner import LIB

SOURCE = """
__device__ int plain;
__device__ float filled[17] = {1, 2, 3};
__constant__ int constant[4] = {1, 2, 3, 4};
static __device__ int private_one = 7;
__managed__ int managed = 3;
template <class T> __device__ T by_type = 5;
namespace space { __device__ float4 vector; }
extern "C" __global__ void kernel(int* out, int i, cudaTextureObject_t t, cudaSurfaceObject_t s) {
    __shared__ int shared[32];
    static int in_function = 3;
    const char* text = ".global .u32 not_a_variable;";
    shared[i] = tex1Dfetch<int>(t, i);
    surf1Dwrite(i, s, 0);
    __syncthreads();
    out[0] = plain + filled[i] + constant[i] + private_one++ + managed + by_type<int> +
             space::vector.x + shared[31 - i] + in_function++ + text[i];
}
"""
VARIABLES = {
    *("plain", "filled", "constant", "private_one", "managed", "_Z7by_typeIiE"),
    *("_ZN5space6vectorE", "_ZZ6kernelE11in_function", "$str"),
}
NO_VARIABLES = 'extern "C" __global__ void kernel(int* out) { out[0] = 1; }'
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
_GET: dict[str, tuple[Any, Any]] = {
    "ptx": (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
    "cubin": (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
    "ltoir": (nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR),
}


@functools.cache
def image(source: str, form: str, architecture: int = 80, *options: str) -> bytes:
    virtual = "sm" if form == "cubin" else "compute"
    program = compile_program(source, f"{virtual}_{architecture}", options)
    get_size, get = _GET[form]
    _, size = get_size(program)
    out = b" " * size
    get(program, out)
    nvrtc.nvrtcDestroyProgram(program)
    return out


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(build(tmp_path_factory.mktemp("modimage")))
    yield reader
    reader.close()


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("form", ["ptx", "cubin"])
def test_compiled_images_name_all_their_variables(
    reader: Reader, form: str, architecture: int
) -> None:
    code = image(SOURCE, form, architecture)
    found = reader.read(code)
    assert (found.known, found.why, found.length) == (True, "", len(code))
    assert set(found.variables) == VARIABLES
    assert set(found.constants) == {"constant"}
    assert reader.limited(code) == found
    assert reader.limited(code + b"behind it") == found


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("form", ["ptx", "cubin"])
def test_images_without_variables_are_known(reader: Reader, form: str, architecture: int) -> None:
    code = image(NO_VARIABLES, form, architecture)
    found = reader.read(code)
    assert (found.known, found.length, found.variables) == (True, len(code), ())


def test_an_external_variable_is_one_in_ptx_and_none_in_a_relocatable_cubin(
    reader: Reader,
) -> None:
    source = "extern __device__ int far; __device__ int near; __global__ void k() { near = far; }"
    ptx = image(source, "ptx", 80, "-rdc=true")
    assert b".extern .global" in ptx
    assert reader.read(ptx).variables == ("far", "near")
    found = reader.read(image(source, "cubin", 80, "-rdc=true"))
    assert (found.known, found.variables) == (True, ("near",))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (".global .u32 a;", "a"),
        (".visible .global .align 16 .b8 a[4][2] = {1, {2}, 3}, b, c = 4;", "a b c"),
        (".weak .const .align 8 .f64 a = 0d3FF0000000000000; .common .global .u32 b;", "a b"),
        (".global .attribute(.managed) .attribute(.unified(1, 2)) .v4 .f32 a;", "a"),
        (".global .u64 a; .global .u64 b[] = {generic(a) + 4, a}, c = generic(a);", "a b c"),
        ("// .global .u32 no;\n/* .global .u32 no; */ .global .u32 $a, _b, %c;", "$a %c _b"),
        (".global .u32 a; .global .u32 a;", "a"),
        (".shared .u32 no; .extern .shared .b8 no2[]; .const .u8 a;", "a"),
        (".global .texref no; .global .samplerref no2 = {addr = 1}; .global .surfref no3;", ""),
        ('.file 1 "a.global .u32 b;" .section .debug_str { .b8 1, 2\n.global .u32 } .const .u8 a;'
         "\n.loc 1 2 3", "a"),
        (".visible .func (.param .b32 r) f (.param .u64 .ptr .global .align 4 no);", ""),
        (".entry f(.param .u64 p) .maxntid 1, 2, 3 .pragma \"a;\"; { L: ld.global.u32 %r, [a]; {"
         "@p st.global.u32 [a], 1; .const .u32 no; call (r), f, (.param); } } .global .u8 a;", "a"),
    ],
)  # fmt: skip
def test_ptx_declarations(reader: Reader, text: str, names: str) -> None:
    found = reader.read((HEAD + text).encode() + b"\0")
    assert (found.known, found.why, found.variables) == (True, "", tuple(names.split()))
    assert found.length == len(HEAD + text) + 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + ".global .u32 a<3>;", "does not end"),
        (HEAD + ".const[2] .u32 a;", "without a name"),
        (HEAD + ".global .u32 a", "does not end"),
        (HEAD + ".global .u32 a = {1", "brackets without end"),
        (HEAD + "/* .global .u32 a;", "comment without end"),
        (HEAD + '.file 1 "a', "string without end"),
        (HEAD + ".entry f", "function without end"),
        (HEAD + ".entry f() { ret;", "function without end"),
        (HEAD + ".func f() { L: .global .u32 a; }", "variable of its own"),
        (HEAD + "#define A .global\n A .u32 a;", "a character"),
        ("#define A\n" + HEAD, "neither PTX"),
        ("", "neither PTX"),
        ("hello", "neither PTX"),
    ],
)
def test_ptx_that_cannot_be_followed_is_unknown(reader: Reader, text: str, why: str) -> None:
    found = reader.read(text.encode() + b"\0")
    assert not found.known
    assert why in found.why


def test_lto_ir_is_unknown(reader: Reader) -> None:
    found = reader.limited(image(NO_VARIABLES, "ltoir", 80, "-dlto", "-rdc=true"))
    assert not found.known
    assert "neither PTX" in found.why


TABLE = "__device__ double table[3] = {1, 0, -1}; __constant__ int step = 4; __device__ char c;"


@pytest.mark.parametrize("form", ["ptx", "cubin"])
@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_variables_without_code_are_reached_by_their_addresses_alone(
    reader: Reader, form: str, architecture: int
) -> None:
    def alone(source: str) -> bool:
        found = reader.read(image(source, form, architecture))
        assert found.known, found.why
        return found.by_address_alone

    assert alone(TABLE)
    assert not alone(TABLE + "__global__ void k() {}")
    assert not alone(TABLE + "__device__ double* first = table;")
    assert not alone(TABLE + "__device__ void* both[2] = {0, &step};")


@pytest.mark.parametrize("packing", ["none", "zstd"])
def test_code_in_one_entry_of_a_fat_binary_is_code(reader: Reader, packing: str) -> None:
    def alone(*sources: str) -> bool:
        parts = [
            entry(image(source, form, 80), packing, kind=kind, architecture=80)
            for source in sources
            for form, kind in (("cubin", 2), ("ptx", 1))
        ]
        found = reader.read(container(*parts))
        assert found.known, found.why
        return found.by_address_alone

    assert alone(TABLE, TABLE)
    assert not alone(TABLE, NO_VARIABLES)


ALLOCATES = """
__device__ __noinline__ void* block(int bytes) { return malloc(bytes); }
__global__ void kernel(void** out) { *out = block(64); }
"""
FREES = "__global__ void kernel(void* old, int* malloc) { free(old); *malloc = 1; }"


@pytest.mark.parametrize("options", [(), ("-rdc=true",)], ids=["whole", "relocatable"])
@pytest.mark.parametrize("form", ["ptx", "cubin"])
@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_managed_variables_are_told(
    reader: Reader, form: str, architecture: int, options: tuple[str, ...]
) -> None:
    plain = SOURCE.replace("__managed__", "__device__")
    assert plain != SOURCE
    with_them, without = (image(text, form, architecture, *options) for text in (SOURCE, plain))
    assert reader.read(with_them).managed
    assert not reader.read(without).managed
    parts = [entry(code, "zstd", kind=1 if form == "ptx" else 2) for code in (without, with_them)]
    assert reader.read(container(*parts)).managed


@pytest.mark.parametrize("form", ["ptx", "cubin"])
@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_code_that_allocates_on_the_device_is_told(
    reader: Reader, form: str, architecture: int
) -> None:
    def heap(source: str) -> bool:
        found = reader.read(image(source, form, architecture))
        assert found.known, found.why
        return found.heap

    assert heap(ALLOCATES)
    assert heap(ALLOCATES.replace("malloc(bytes)", "new char[bytes]"))
    assert not heap(FREES)
    assert not heap(SOURCE)


POINTERS = """
__device__ int f(int x) { return x * 3; }
__device__ int g(int x) { return x + 5; }
struct Row { int number; int (*function)(int); };
__device__ Row table[] = {{1, f}, {2, nullptr}, {3, g}};
__device__ int* other = &table[1].number;
extern "C" __global__ void k(int* o, int i) { *o = table[i].function(*other); }
"""


@pytest.mark.parametrize("architecture", [75, 80, 90])
@pytest.mark.parametrize("option", ["-G", "-rdc=true"])
def test_a_cubin_tells_where_addresses_are(reader: Reader, architecture: int, option: str) -> None:
    found = reader.read(image(POINTERS, "cubin", architecture, option))
    assert found.addresses == (("other", 0, False), ("table", 8, True), ("table", 40, True))


def test_a_program_compiled_as_a_whole_has_no_addresses_of_functions(reader: Reader) -> None:
    assert reader.read(image(POINTERS, "cubin", 90)).addresses == (("other", 0, False),)


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        (".global .u32 a = 1U, b[2] = {0x1F, -2}; .const .f64 c[1] = {0d3FF0000000000000};", True),
        (".global .align 4 .b8 a[3] = {1, 2, 3}; .global .u32 b;", True),
        (".global .u32 a; .global .u64 b = a;", False),
        (".global .u32 a; .global .u64 b[2] = {0, generic(a)};", False),
        (".global .u32 a; .global .b8 b[8] = {0xFF(a), 0, 0, 0, 0, 0, 0, 0};", False),
        (".global .u32 a = 1; .entry f() { ret; }", False),
        (".global .u32 a = 1; .visible .func f;", False),
    ],
)
def test_ptx_in_which_addresses_are_used(reader: Reader, text: str, alone: bool) -> None:
    found = reader.read((HEAD + text).encode() + b"\0")
    assert (found.known, found.by_address_alone) == (True, alone)


_DECLARATION = st.tuples(
    st.sampled_from(["", ".visible ", ".weak ", ".common\n"]),
    st.sampled_from([".global ", ".const ", ".shared "]),
    st.sampled_from(["", ".align 16 ", ".align\t8 /* , */ "]),
    st.sampled_from([".u8 ", ".b32 ", ".f64 ", ".v2 .u32 ", ".v4 .f32 "]),
    st.sampled_from(["a", "_", "$", "%", "global"]),
    st.sampled_from(["", "[3]", "[2][2]", "// .global .u32 x;\n", " /* = 3; */"]),
)
_FUNCTION = st.tuples(
    st.sampled_from([".func ", ".visible .func ", ".entry ", ".visible .entry "]),
    st.sampled_from(["()", "(.param .u64 a)", "(.param .u64 .ptr .global .align 4 a)"]),
    st.sampled_from(["", "$L:", ".shared .u32 s;", "// .global .u32 x;\n", ".local .b8 l[4];"]),
    st.sampled_from(["", "{ mov.u32 %r1, 2; }", "st.global.u32 [%d1], %r1;"]),
)


@st.composite
def _modules(draw: st.DrawFn) -> str:
    lines = [HEAD]
    for index in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            linkage, space, align, kind, name, tail = draw(_DECLARATION)
            initial = " = {}" if space != ".shared " and draw(st.booleans()) else ""
            lines.append(f"{linkage}{space}{align}{kind}{name}{index}{tail}{initial};")
        else:
            head, parameters, first, second = draw(_FUNCTION)
            lines.append(f"{head}f{index}{parameters} {{ .reg .b32 %r<3>; .reg .b64 %d<3>;")
            lines.append(f"{first} {second} ret; }}")
    return draw(st.sampled_from([" ", "\n", "\n// .entry f() {\n"])).join(lines)


def _variables_by_the_emulator(text: bytes) -> set[str]:
    LIB.ptx_open.restype = ctypes.c_void_p
    message, name = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
    opened = LIB.ptx_open(text, ctypes.c_size_t(len(text)), message, ctypes.c_size_t(256))
    assert opened is not None, (message.value, text)
    session = ctypes.c_void_p(opened)
    names = set()
    for index in range(LIB.ptx_variable_count(session)):
        LIB.ptx_variable(session, index, name, ctypes.c_size_t(64))
        names.add(name.value.decode())
    LIB.ptx_close(session)
    return names


@settings(max_examples=300, deadline=None)
@given(text=_modules())
def test_ptx_variables_are_those_that_the_interpreter_places(reader: Reader, text: str) -> None:
    found = reader.read(text.encode() + b"\0")
    assert found.known, found.why
    assert set(found.variables) == _variables_by_the_emulator(text.encode())


@pytest.mark.parametrize("options", [(), ("-rdc=true",), ("-G",), ("-lineinfo",)])
@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_cubins_of_every_kind_are_read_as_their_symbols_say(
    reader: Reader, architecture: int, options: tuple[str, ...]
) -> None:
    code = image(SOURCE, "cubin", architecture, *options)
    found = reader.read(code)
    assert (found.known, found.why, found.length) == (True, "", len(code))
    assert set(found.variables) == Cubin(code).variables() > {"plain", "constant", "managed"}


def test_a_cubin_without_symbols_is_known_only_if_it_has_no_variables(reader: Reader) -> None:
    without, with_some = (Cubin(image(source, "cubin", 80)) for source in (NO_VARIABLES, SOURCE))
    for cubin in (without, with_some):
        cubin.set_section(cubin.find(".symtab"), type=1)
    assert reader.read(bytes(without.code)).known
    found = reader.read(bytes(with_some.code))
    assert not found.known
    assert found.why == "cubin: memory in .nv.global that no symbol names"


def test_memory_without_a_name_counts_only_where_a_relocation_may_lead_to_it(
    reader: Reader,
) -> None:
    cubin = Cubin(image(SOURCE, "cubin", 90, "-rdc=true"))
    _, place, symbol = cubin.symbol("filled")
    cubin.code[place + 4] = symbol[1] & 0xF0  # STT_NOTYPE
    assert reader.read(bytes(cubin.code)).known
    # A relocation that names the section, with any addend.
    cubin.code[place + 4] = symbol[1] & 0xF0 | 3
    assert reader.read(bytes(cubin.code)).why == (
        "cubin: memory in .nv.global that no symbol names"
    )


def test_textures_in_a_cubin_are_no_variables(reader: Reader) -> None:
    cubin = Cubin(
        image("__constant__ int a, b; __global__ void k(int* o) { *o = a + b; }", "cubin")
    )
    strings = cubin.section(cubin.find(".symtab"))[6]
    for place, symbol in cubin.symbols():
        if cubin.name(strings, symbol[0]) == "a":
            cubin.code[place + 4] = symbol[1] & 0xF0 | 10
    assert reader.read(bytes(cubin.code)).variables == ("b",)


def test_a_cubin_with_more_sections_than_its_header_can_count(reader: Reader) -> None:
    cubin = Cubin(image(SOURCE, "cubin", 80))
    symbols = cubin.symbols()
    indices = struct.pack(f"<{len(symbols)}I", *(symbol[3] for _, symbol in symbols))
    for place, symbol in symbols:
        if 0 < symbol[3] < 0xFF00:
            struct.pack_into("<H", cubin.code, place + 6, 0xFFFF)
    table = bytes(cubin.code[cubin.table : cubin.table + 64 * cubin.count])
    offset = len(cubin.code)
    extra = struct.pack(
        "<IIQQQQIIQQ", 0, 18, 0, 0, offset, len(indices), cubin.find(".symtab"), 0, 4, 4
    )
    names, count = cubin.names, cubin.count + 1
    cubin.code += indices + table + extra
    cubin.table = offset + len(indices)
    struct.pack_into("<Q", cubin.code, 40, cubin.table)
    struct.pack_into("<HH", cubin.code, 60, 0, 0xFFFF)
    cubin.set_section(0, size=count, link=names)
    found = reader.read(bytes(cubin.code))
    assert (found.known, found.why, found.length) == (True, "", len(cubin.code))
    assert set(found.variables) == VARIABLES


@pytest.mark.parametrize("packing", ["none", "lz4", "zstd"])
def test_a_fat_binary_has_the_variables_of_all_its_entries(reader: Reader, packing: str) -> None:
    late = image("__device__ int late; __global__ void k() { late = 1; }", "cubin", 90)
    binary = container(
        entry(image(SOURCE, "cubin", 80), packing, kind=2, architecture=80),
        entry(late, packing, kind=2, architecture=90),
        entry((HEAD + ".global .u32 text;").encode(), packing, architecture=90),
    )
    found = reader.read(binary)
    assert (found.known, found.why, found.length) == (True, "", len(binary))
    assert set(found.variables) == VARIABLES | {"late", "text"}
    assert reader.read(container()).known


def test_wrappers_lead_to_their_containers(reader: Reader) -> None:
    linked, first, second = (
        fatbin((HEAD + f".global .u32 {name};").encode(), "none") for name in "abc"
    )
    for how in (WRAPPER_1, WRAPPER_2):
        found = reader.read(linked, how=how)
        assert (found.known, found.length) == (True, len(linked))
        assert (found.linked_from, found.variables) == (0, ("a",))
    found = reader.read(linked, first, second, how=WRAPPER_2)
    assert (found.linked_from, found.variables) == (2, ("a", "b", "c"))
    assert reader.read(linked, first, how=WRAPPER_1).variables == ("a",)


def test_wrappers_of_something_else_are_unknown(reader: Reader) -> None:
    found = reader.read(bytes(64), how=WRAPPER_1)
    assert (found.known, found.why) == (False, "a wrapper of something that is no fat binary")
    found = reader.read(container(), how=WRAPPER_2 + 1)
    assert (found.known, found.why) == (False, "a fat binary's wrapper of version 3")
    found = reader.limited(struct.pack("<II", 0x466243B1, 1))
    assert (found.known, found.why) == (False, "a fat binary's wrapper that is cut short")


@pytest.mark.parametrize("packing", ["lz4", "zstd"])
def test_what_cannot_be_unpacked_is_named(reader: Reader, packing: str) -> None:
    good = fatbin((HEAD + ".global .u32 a;").encode(), packing)
    found = reader.limited(good[:80] + b"\xff" * 20 + good[100:])
    assert (found.known, found.length) == (False, len(good))
    assert f"lib{packing}.so.1 cannot unpack it" in found.why


def test_entries_of_an_unknown_kind_are_named(reader: Reader) -> None:
    binary = container(
        entry((HEAD + ".global .u32 a;").encode(), "none"), entry(b"LTO IR..", "none", kind=8)
    )
    found = reader.limited(binary)
    assert (found.known, found.variables) == (False, ("a",))
    assert found.why == "an entry of kind 8 in the fat binary"


def _samples() -> dict[str, bytes]:
    cubin, ptx = image(SOURCE, "cubin", 90), image(SOURCE, "ptx", 90)
    plain = container(entry(cubin, "none", kind=2), entry(ptx, "none"))
    packed = container(entry(cubin, "zstd", kind=2), entry(ptx, "lz4"))
    relocatable = image(SOURCE, "cubin", 90, "-rdc=true")
    return {
        "cubin": cubin,
        "relocatable": relocatable,
        "ptx": ptx,
        "plain": plain,
        "packed": packed,
    }


SAMPLES = ("cubin", "relocatable", "ptx", "plain", "packed")


@pytest.mark.parametrize("name", SAMPLES)
def test_an_image_that_is_cut_short_is_unknown(reader: Reader, name: str) -> None:
    code = _samples()[name]
    assert reader.limited(code).known
    for length in (*range(0, len(code), 7), *range(max(0, len(code) - 200), len(code))):
        assert not reader.limited(code[:length]).known, length


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_a_damaged_image_is_read_within_its_bounds(
    reader: Reader, name: str, data: st.DataObject
) -> None:
    code = bytearray(_samples()[name])
    tables = list(range(min(len(code), 256)))
    if name in ("cubin", "relocatable"):
        tables += range(Cubin(bytes(code)).table, len(code))
    places = st.one_of(st.sampled_from(tables), st.integers(0, len(code) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        code[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(code)), st.integers(0, len(code))))
    assert reader.limited(bytes(code[:cut])).length <= cut
