"""native/modimage: cubins whose variables are elsewhere, and which code of an image is taken."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emu.fatbins import container, entry
from tests.emu.image_reader import Program, build
from tests.emu.test_module_images import Cubin, image

# The kernels' sections have "debug" in their names, as those for debuggers have.
SOURCE = """
__device__ int v[64] = {1, 2, 3};
__device__ int zero[64];
static __device__ int private_one = 5;
static __device__ short private_zero[3];
__device__ char unused[7];
__device__ __align__(256) char aligned[3] = {1};
__constant__ int constant[16] = {7, 8, 9};
__device__ int* pointer = &v[2];
__constant__ int* in_constant = &v[1];
struct Pair { int* first; int* second; };
__device__ Pair pair = {&v[5], &zero[7]};
__device__ int* volatile where[3];
__device__ __noinline__ int called(int x) { return x / 7; }
extern "C" __global__ void debug_kernel(int* o) {
    int i = threadIdx.x;
    zero[i]++;
    private_zero[i % 3]++;
    v[i] += called(i) + private_one++;
    o[i] = v[i] + constant[i % 16] + zero[i] + aligned[i % 3] + private_zero[2];
    o[63] = *pointer + *in_constant;
    where[0] = v + 9;
    where[1] = zero + 63;
    where[2] = pair.second;
}
"""
FUNCTION = """
__device__ int f(int x) { return x * 3; }
__device__ int (*pointer)(int) = f;
extern "C" __global__ void k(int* o) { *o = pointer(*o); }
extern "C" __global__ void set(int** o) { *o = (int*)&pointer; }
"""
NO_VARIABLES = 'extern "C" __global__ void k(int* out) { out[0] = 1; }'
BASES = (0x7F83_E280_1A00, 0x3_FFFF_FE00)
KINDS = [(80, ()), (90, ()), (80, ("-G",)), (90, ("-G",))]
WHOLE, GENERIC, LOW, HIGH = 2, 4, 56, 57


@dataclass(frozen=True)
class Moved:
    code: bytes
    contents: bytes
    known: bool
    variables: frozenset[str]


@dataclass(frozen=True)
class Movable:
    why: str
    size: int
    places: tuple[tuple[str, int, int], ...]
    at: tuple[Moved, Moved]
    code_addresses: tuple[tuple[str, int], ...]


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode(errors="replace")


class Mover(Program):
    def _send(self, what: int, first: int, second: int, code: bytes) -> None:
        self.ask(struct.pack("<IQQQ", what, first, second, len(code)) + code)

    def move(
        self, code: bytes, bases: tuple[int, int] = BASES, *, managed: bool = False
    ) -> Movable:
        self._send(3 if managed else 0, *bases, code)
        why, size, *words = self.line()
        rest, functions = words[: words.index("|")], words[words.index("|") + 1 :]
        names = [_text(name) for name in rest[::3]]
        places = tuple(zip(names, map(int, rest[1::3]), map(int, rest[2::3]), strict=True))
        moved = []
        for _ in bases:
            cubin, contents, known, *variables = self.line()
            found = (_text(name) for name in variables)
            moved.append(
                Moved(bytes.fromhex(cubin), bytes.fromhex(contents), known == "1", frozenset(found))
            )
        addresses = tuple(zip(map(_text, functions[::2]), map(int, functions[1::2]), strict=True))
        return Movable(_text(why), int(size), places, (moved[0], moved[1]), addresses)

    def choose(
        self, code: bytes, major: int, minor: int, *, linked: bool = False
    ) -> tuple[str, str, bytes]:
        """Form, why, code."""
        self._send(2 if linked else 1, major, minor, code)
        form, why, chosen = self.line()
        forms = ("none", "ptx", "cubin")
        return forms[int(form)], _text(why), bytes.fromhex(chosen)


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mover]:
    program: Path = build(tmp_path_factory.mktemp("movable"), "test_move")
    mover = Mover(program)
    yield mover
    mover.close()


@dataclass(frozen=True)
class Reference:
    """A relocation outside of the sections for debuggers."""

    entry: int  # where it is, in the file
    table: int
    target: str
    place: int  # what is relocated, in the file
    kind: int
    symbol: int
    home: str
    addend: int


class Linked(Cubin):
    """A cubin with its relocations."""

    def title(self, index: int) -> str:
        return self.name(self.names, self.section(index)[0]) if 0 < index < self.count else ""

    def references(self) -> list[Reference]:
        symbols = self.symbols()
        found = []
        for table in range(self.count):
            _, kind, _, _, offset, size, _, target, _, step = self.section(table)
            if kind not in (4, 9) or self.title(target).startswith((".debug", ".nv_debug")):
                continue
            for at in range(offset, offset + size, step):
                place, info = struct.unpack_from("<QQ", self.code, at)
                place += self.section(target)[4]
                addend = struct.unpack_from("<q", self.code, at + 16)[0] if kind == 4 else 0
                home = self.title(symbols[info >> 32][1][3])
                found.append(
                    Reference(
                        *(at, table, self.title(target), place),
                        *(info & 0xFFFFFFFF, info >> 32, home, addend),
                    )
                )
        return found

    def to_variables(self) -> list[Reference]:
        return [one for one in self.references() if one.home.startswith(".nv.global")]

    def change(self, reference: Reference, *, kind: int, symbol: int) -> None:
        struct.pack_into("<Q", self.code, reference.entry + 8, symbol << 32 | kind)

    def in_storage(self) -> list[tuple[int, str, str, int, int]]:
        """Symbol, name, section, place in the file and size of each variable."""
        strings = self.section(self.find(".symtab"))[6]
        return [
            (
                *(index, self.name(strings, symbol[0]), self.title(symbol[3])),
                *(self.section(symbol[3])[4] + symbol[4], symbol[5]),
            )
            for index, (_, symbol) in enumerate(self.symbols())
            if symbol[1] & 15 == 1 and self.title(symbol[3]).startswith(".nv.global")
        ]


@functools.cache
def _source(architecture: int, options: tuple[str, ...]) -> bytes:
    return image(SOURCE, "cubin", architecture, *options)


def _offsets(cubin: Linked, movable: Movable) -> dict[int, int]:
    """Places of variables in the block, by symbol."""
    stored = cubin.in_storage()
    assert [(name, size) for _, name, _, _, size in stored] == [
        (name, size) for name, _, size in movable.places
    ]
    places = (offset for _, offset, _ in movable.places)
    return {one[0]: offset for one, offset in zip(stored, places, strict=True)}


def _fields(cubin: Linked, movable: Movable, base: int) -> dict[int, bytes]:
    """What is to stand where, for each reference to a variable."""
    offsets = _offsets(cubin, movable)
    out = {}
    for one in cubin.to_variables():
        address = struct.pack("<Q", base + offsets[one.symbol] + one.addend)
        if one.kind in (WHOLE, GENERIC):
            out[one.place] = address
        else:
            out[one.place + 4] = {LOW: address[:4], HIGH: address[4:]}[one.kind]
    return out


def _apply(cubin: Linked, fields: dict[int, bytes]) -> bytes:
    """The cubin with the fields, and without the relocations to variables."""
    out = Linked(bytes(cubin.code))
    for place, value in fields.items():
        out.code[place : place + len(value)] = value
    gone = {one.entry for one in cubin.to_variables()}
    for table in {one.table for one in cubin.to_variables()}:
        _, _, _, _, offset, size, _, _, _, step = cubin.section(table)
        entries = [at for at in range(offset, offset + size, step) if at not in gone]
        kept = b"".join(bytes(cubin.code[at : at + step]) for at in entries)
        out.code[offset : offset + len(kept)] = kept
        out.set_section(table, size=len(kept))
    return bytes(out.code)


@pytest.mark.parametrize(("architecture", "options"), KINDS)
def test_a_moved_cubin_has_addresses_in_the_block_and_no_relocations_to_variables(
    mover: Mover, architecture: int, options: tuple[str, ...]
) -> None:
    cubin = Linked(_source(architecture, options))
    movable = mover.move(bytes(cubin.code))
    assert movable.why == ""
    kinds = {one.kind for one in cubin.to_variables()}
    assert kinds == ({GENERIC, LOW, HIGH} if options else {WHOLE, GENERIC})
    for base, moved in zip(BASES, movable.at, strict=True):
        assert moved.code == _apply(cubin, _fields(cubin, movable, base))
        left = Linked(moved.code)
        assert left.to_variables() == []
        assert len(left.references()) == len(cubin.references()) - len(cubin.to_variables())
        assert moved.known
        assert set(moved.variables) == cubin.variables()


@pytest.mark.parametrize(("architecture", "options"), KINDS)
def test_cubins_for_two_blocks_differ_in_the_addresses_alone(
    mover: Mover, architecture: int, options: tuple[str, ...]
) -> None:
    cubin = Linked(_source(architecture, options))
    movable = mover.move(bytes(cubin.code))
    first, second = (moved.code for moved in movable.at)
    fields = _fields(cubin, movable, BASES[0])
    addresses = {at + i for at, value in fields.items() for i in range(len(value))}
    differing = {i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}
    assert differing and differing <= addresses
    assert mover.move(bytes(cubin.code), (BASES[0], BASES[0])).at == (movable.at[0],) * 2


@pytest.mark.parametrize(("architecture", "options"), KINDS)
def test_all_variables_have_places_of_their_own(
    mover: Mover, architecture: int, options: tuple[str, ...]
) -> None:
    cubin = Linked(_source(architecture, options))
    movable = mover.move(bytes(cubin.code))
    places = {name: (offset, size) for name, offset, size in movable.places}
    assert {name: size for name, (_, size) in places.items()} == {
        "v": 256,
        "zero": 256,
        "private_one": 4,
        "private_zero": 6,
        "unused": 7,
        "aligned": 3,
        "pointer": 8,
        "pair": 16,
        "where": 24,
    }
    end = 0
    for offset, size in sorted(places.values()):
        assert offset >= end
        end = offset + size
    assert end <= movable.size
    for name, alignment in {"aligned": 256, "pointer": 8, "pair": 8, "where": 8, "zero": 4}.items():
        assert places[name][0] % alignment == 0


@pytest.mark.parametrize(("architecture", "options"), KINDS)
def test_a_block_begins_with_the_first_values(
    mover: Mover, architecture: int, options: tuple[str, ...]
) -> None:
    cubin = Linked(_source(architecture, options))
    movable = mover.move(bytes(cubin.code))
    places = {name: offset for name, offset, _ in movable.places}
    for base, moved in zip(BASES, movable.at, strict=True):
        assert len(moved.contents) == movable.size
        at = {name: moved.contents[offset:] for name, offset in places.items()}
        assert at["v"][:256] == struct.pack("<64i", 1, 2, 3, *[0] * 61)
        assert at["private_one"][:4] == struct.pack("<i", 5)
        assert at["aligned"][:3] == b"\1\0\0"
        assert at["pointer"][:8] == struct.pack("<Q", base + places["v"] + 8)
        assert at["pair"][:16] == struct.pack(
            "<QQ", base + places["v"] + 20, base + places["zero"] + 28
        )
        for name, size in {"zero": 256, "private_zero": 6, "unused": 7, "where": 24}.items():
            assert at[name][:size] == bytes(size)


def test_a_cubin_without_variables_stays_as_it_is(mover: Mover) -> None:
    code = image(NO_VARIABLES, "cubin", 90)
    movable = mover.move(code)
    assert (movable.why, movable.size, movable.places) == ("", 0, ())
    assert all((moved.code, moved.contents) == (code, b"") for moved in movable.at)


def test_functions_that_kernels_call_by_address_stay(mover: Mover) -> None:
    cubin = Linked(image(SOURCE + FUNCTION.replace("pointer", "g"), "cubin", 90, "-lineinfo"))
    movable = mover.move(bytes(cubin.code))
    assert movable.why == ""
    assert movable.at[0].code == _apply(cubin, _fields(cubin, movable, BASES[0]))


# Without -G the value is a number in a table of the kernel's own (.nv.constant2).
@pytest.mark.parametrize("architecture", [80, 90])
def test_an_address_of_a_function_in_a_variable_is_the_drivers_to_tell(
    mover: Mover, architecture: int
) -> None:
    assert mover.move(image(FUNCTION, "cubin", architecture)).code_addresses == ()
    source = FUNCTION + "__device__ int (*table[3])(int) = {nullptr, f, f};"
    source += 'extern "C" __global__ void uses(int* o) { *o = table[*o](*o); }'
    cubin = Linked(image(source, "cubin", architecture, "-G"))
    movable = mover.move(bytes(cubin.code))
    assert movable.why == ""
    assert sorted(movable.code_addresses) == [("pointer", 0), ("table", 8), ("table", 16)]
    # The driver fills its own variables as before.
    name = f".rel{'a' if architecture == 90 else ''}.nv.global.init"
    assert Linked(movable.at[0].code).contents(name) == cubin.contents(name)


def _refusal(mover: Mover, code: bytes) -> str:
    """Why nothing of it is moved."""
    movable = mover.move(code)
    assert (movable.size, movable.places) == (0, ())
    assert {moved.code for moved in movable.at} == {code}
    return movable.why


MANAGED = """
__device__ int v = 3;
__managed__ int m = 4;
__managed__ int table[100];
__device__ int* pointer = &v;
extern "C" __global__ void k(int* o) { m++; table[m] += v++; *o = *pointer; CALL; }
"""


@pytest.mark.parametrize(("architecture", "options"), KINDS)
@pytest.mark.parametrize("call", ["", 'printf("%d", m)'])
def test_managed_variables_move_by_themselves(
    mover: Mover, architecture: int, options: tuple[str, ...], call: str
) -> None:
    code = image(MANAGED.replace("CALL", call), "cubin", architecture, *options)
    cubin = Linked(code)
    ours = {one[0] for one in cubin.in_storage() if one[1] in ("m", "table")}
    first = mover.move(code, managed=True)
    assert first.why == ""
    assert {(name, size) for name, _, size in first.places} == {("m", 4), ("table", 400)}
    at = {name: offset for name, offset, _ in first.places}
    left = Linked(first.at[0].code)
    assert first.at[0].contents[at["m"] :][:4] == struct.pack("<i", 4)
    assert first.at[0].contents[at["table"] :][:400] == bytes(400)
    assert {one.symbol for one in left.to_variables()} == {
        one.symbol for one in cubin.to_variables()
    } - ours
    # Plain ones move likewise, before or after.
    second = mover.move(first.at[0].code)
    if call:
        assert second.why == "cubin: calls vprintf of the driver's"
        return
    assert {name for name, _, _ in second.places} == {"v", "pointer"}
    assert Linked(second.at[0].code).to_variables() == []
    plain = mover.move(code)
    assert plain.places == second.places
    both = mover.move(plain.at[0].code, managed=True)
    assert both.places == first.places
    assert Linked(both.at[0].code).to_variables() == []


def test_code_without_managed_variables_has_none_to_move(mover: Mover) -> None:
    movable = mover.move(_source(90, ()), managed=True)
    assert (movable.why, movable.places) == ("", ())
    assert movable.at[0].code == _source(90, ())


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ('printf("%d", v)', "vprintf"),
        ('if (v) __assertfail("v", "file", 1, "kernel", 1)', "__assertfail"),
        ("free(malloc(v))", ""),
    ],
)
def test_texts_that_the_driver_reads_stay_where_it_has_put_them(
    mover: Mover, architecture: int, call: str, name: str
) -> None:
    code = f"__device__ int v = 3; __global__ void k() {{ {call}; }}"
    why = mover.move(image(code, "cubin", architecture)).why
    assert why == (name and f"cubin: calls {name} of the driver's")


def test_what_cannot_be_moved_says_why(mover: Mover) -> None:
    assert _refusal(mover, image(SOURCE, "cubin", 90, "-rdc=true")) == "cubin: relocatable code"
    assert (
        _refusal(
            mover,
            image(
                "__device__ __align__(1024) char a[9]; __global__ void k() { a[1] = 1; }", "cubin"
            ),
        )
        == "cubin: variables aligned at 1024"
    )
    assert _refusal(mover, b"") == "cubin: no ELF file"
    assert _refusal(mover, image(SOURCE, "ptx", 90)) == "cubin: no ELF file"
    assert _refusal(mover, b"A" + _source(90, ())[1:]) == "cubin: no ELF file"
    why = mover.move(image(SOURCE, "cubin", 100)).why
    assert ".nv.merc." in why or ".nv.capmerc." in why
    assert why.endswith(": references of a form not known")


def test_other_kinds_of_relocations_are_refused_only_where_they_lead_to_variables(
    mover: Mover,
) -> None:
    cubin = Linked(_source(90, ("-G",)))
    other = next(one for one in cubin.references() if one.home.startswith(".text"))
    cubin.change(other, kind=58, symbol=other.symbol)
    assert mover.move(bytes(cubin.code)).why == ""
    for number in (0, 1, 3, 58):
        cubin = Linked(_source(90, ()))
        one = next(one for one in cubin.to_variables() if one.target == ".nv.constant4")
        cubin.change(one, kind=number, symbol=one.symbol)
        assert (
            _refusal(mover, bytes(cubin.code))
            == f"cubin: relocation of type {number} in .rela.nv.constant4: not known for a variable"
        )


def test_relocations_may_name_the_section_of_a_variable(mover: Mover) -> None:
    cubin = Linked(_source(90, ()))
    for home in (".nv.global", ".nv.global.init"):
        section = next(
            index
            for index, (_, symbol) in enumerate(cubin.symbols())
            if symbol[1] & 15 == 3 and cubin.title(symbol[3]) == home
        )
        one = next(one for one in cubin.to_variables() if one.home == home)
        value = cubin.symbols()[one.symbol][1][4]
        changed = Linked(bytes(cubin.code))
        changed.change(one, kind=one.kind, symbol=section)
        struct.pack_into("<q", changed.code, one.entry + 16, one.addend + value)
        moved = mover.move(bytes(changed.code)).at
        for ours, theirs in zip(mover.move(bytes(cubin.code)).at, moved, strict=True):
            assert ours.contents == theirs.contents
            assert ours.code[one.place : one.place + 8] == theirs.code[one.place : one.place + 8]


def test_an_addend_may_be_in_the_place_that_is_relocated(mover: Mover) -> None:
    cubin = Linked(_source(80, ()))
    one = next(one for one in cubin.to_variables() if one.target == ".nv.constant4")
    assert cubin.section(one.table)[1] == 9
    (plain,) = struct.unpack_from("<Q", mover.move(bytes(cubin.code)).at[0].code, one.place)
    struct.pack_into("<q", cubin.code, one.place, -12)
    (moved,) = struct.unpack_from("<Q", mover.move(bytes(cubin.code)).at[0].code, one.place)
    assert moved == plain - 12


def test_half_of_an_addend_in_an_instruction_is_refused(mover: Mover) -> None:
    cubin = Linked(_source(80, ("-G",)))
    one = next(one for one in cubin.to_variables() if one.kind == LOW)
    assert cubin.section(one.table)[1] == 9
    struct.pack_into("<I", cubin.code, one.place + 4, 16)
    assert (
        _refusal(mover, bytes(cubin.code))
        == "cubin: relocation of type 56 in .rel.text.debug_kernel: half of an addend"
    )


def test_relocations_outside_of_their_section_are_refused(mover: Mover) -> None:
    cubin = Linked(_source(90, ()))
    one = next(one for one in cubin.to_variables() if one.target == ".nv.constant4")
    size = cubin.section(cubin.find(".nv.constant4"))[5]
    for place, why in {
        size - 8: "",
        size - 7: "outside of its section",
        2**64 - 1: "outside",
    }.items():
        struct.pack_into("<Q", cubin.code, one.entry, place)
        assert why in mover.move(bytes(cubin.code)).why
        assert (mover.move(bytes(cubin.code)).why == "") == (why == "")
    cubin.change(one, kind=2, symbol=len(cubin.symbols()))
    assert mover.move(bytes(cubin.code)).why.endswith(": no symbol")


def test_symbols_and_tables_of_other_kinds_are_refused(mover: Mover) -> None:
    names = {name: index for index, name, *_ in Linked(_source(90, ())).in_storage()}
    cubin = Linked(_source(90, ()))
    cubin.code[cubin.symbols()[names["unused"]][0] + 4] = 10
    assert _refusal(mover, bytes(cubin.code)) == "cubin: unused among the variables is none"
    cubin = Linked(_source(90, ()))
    cubin.set_section(cubin.find(".nv.global"), size=2**63)
    struct.pack_into("<Q", cubin.code, cubin.symbols()[names["zero"]][0] + 16, 2**63)
    assert _refusal(mover, bytes(cubin.code)) == "cubin: more variables than any GPU holds"
    cubin = Linked(_source(90, ()))
    table = cubin.find(".rela.nv.constant4")
    struct.pack_into("<Q", cubin.code, cubin.table + 64 * table + 56, 16)
    assert (
        _refusal(mover, bytes(cubin.code)) == "cubin: .rela.nv.constant4 is no table of relocations"
    )


def test_a_cubin_that_is_cut_short_is_refused(mover: Mover) -> None:
    code = _source(90, ())
    for length in (*range(0, len(code), 97), *range(len(code) - 64, len(code))):
        assert _refusal(mover, code[:length]) == mover.move(code[:length]).why
        assert mover.move(code[:length]).why != ""


@pytest.mark.parametrize(("architecture", "options"), KINDS)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_damaged_cubin_harms_nothing(
    mover: Mover, architecture: int, options: tuple[str, ...], data: st.DataObject
) -> None:
    cubin = Linked(_source(architecture, options))
    code = bytearray(cubin.code)
    tables = [*range(64), *range(cubin.table, cubin.table + 64 * cubin.count)]
    for table in range(cubin.count):
        _, kind, _, _, offset, size, *_ = cubin.section(table)
        if kind in (2, 4, 9) and "debug" not in cubin.title(table)[:10]:
            tables += range(offset, offset + size)
    places = st.one_of(st.sampled_from(tables), st.integers(0, len(code) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        code[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(code)), st.integers(0, len(code))))
    movable = mover.move(bytes(code[:cut]))
    for moved in movable.at:
        assert len(moved.code) == cut
        assert len(moved.contents) == movable.size or movable.size > 2**24
    if movable.why:
        assert (movable.size, movable.places) == (0, ())
    assert all(offset + size <= movable.size for _, offset, size in movable.places)


@functools.cache
def _cubin(architecture: int) -> bytes:
    return image(NO_VARIABLES, "cubin", architecture)


def _ptx(architecture: int) -> bytes:
    return f".version 8.0\n.target sm_{architecture}\n.address_size 64\n".encode() + b"\0"


def _fat(
    cubins: tuple[int, ...] = (), ptx: tuple[int, ...] = (), packing: str = "none"
) -> list[bytes]:
    return [
        *(entry(_cubin(number), packing, kind=2, architecture=number) for number in cubins),
        *(entry(_ptx(number), packing, architecture=number) for number in ptx),
    ]


def _flagged(one: bytes, flag: int) -> bytes:
    (flags,) = struct.unpack_from("<Q", one, 40)
    return one[:40] + struct.pack("<Q", flags | flag) + one[48:]


EXACT, FAMILY = 0x100000, 0x200000  # sm_90a, sm_100f


@pytest.mark.parametrize("packing", ["none", "lz4", "zstd"])
@pytest.mark.parametrize(
    ("cubins", "ptx", "gpu", "form", "chosen"),
    [
        ((80, 90), (90,), (9, 0), "cubin", 90),
        ((90, 80), (90,), (9, 0), "cubin", 90),
        ((80, 86, 89), (), (8, 6), "cubin", 86),
        ((89, 86, 80), (), (8, 6), "cubin", 86),
        ((80, 86), (89,), (8, 9), "cubin", 86),
        ((80, 86), (75, 80, 90, 100), (9, 0), "ptx", 90),
        ((80,), (90, 89, 75), (8, 9), "cubin", 80),
        ((86,), (80, 75), (8, 0), "ptx", 80),
        ((), (75, 70), (12, 0), "ptx", 75),
        ((90,), (), (10, 0), "none", 0),
        ((80, 89), (100,), (9, 0), "none", 0),
        ((), (), (9, 0), "none", 0),
    ],
)
def test_the_code_of_a_fat_binary_that_the_driver_takes(
    mover: Mover,
    cubins: tuple[int, ...],
    ptx: tuple[int, ...],
    gpu: tuple[int, int],
    form: str,
    chosen: int,
    packing: str,
) -> None:
    orders = (_fat(cubins, ptx, packing), _fat(cubins, ptx, packing)[::-1])
    for binary in (container(*entries) for entries in orders):
        found, why, code = mover.choose(binary, *gpu)
        assert found == form
        if form == "none":
            gpu_name = f"{gpu[0]}.{gpu[1]}"
            assert (why, code) == (
                f"the fat binary has no code for compute capability {gpu_name}",
                b"",
            )
        else:
            expected = _cubin(chosen) if form == "cubin" else _ptx(chosen)
            assert (why, code) == ("", expected + bytes(len(code) - len(expected)))


def test_code_for_one_gpu_alone_or_for_its_family(mover: Mover) -> None:
    (cubin,), (text,) = _fat((100,)), _fat((), (100,))
    runs = {
        0: ("ptx", "ptx", "ptx"),
        EXACT: ("ptx", "none", "none"),
        FAMILY: ("ptx", "ptx", "none"),
    }
    for flag, forms in runs.items():
        gpus = ((10, 0), (10, 3), (12, 0))
        assert tuple(mover.choose(container(_flagged(text, flag)), *g)[0] for g in gpus) == forms
    cubin_runs = {0: ("cubin", "cubin"), EXACT: ("cubin", "none"), FAMILY: ("cubin", "cubin")}
    for flag, forms2 in cubin_runs.items():
        found = [mover.choose(container(_flagged(cubin, flag)), 10, minor)[0] for minor in (0, 3)]
        assert tuple(found) == forms2


def test_of_code_that_is_as_good_none_is_chosen(mover: Mover) -> None:
    cubin, text = _fat((90,), (90,))
    why = "the fat binary has more than one code for compute capability 9.0"
    for twice in ((cubin, _flagged(cubin, EXACT)), (text, _flagged(text, EXACT))):
        assert mover.choose(container(*twice), 9, 0) == ("none", why, b"")
    # A better one, or none of the cubins that are there twice, is no such case.
    older = _fat((80, 80, 90), (90, 90))
    assert mover.choose(container(*older), 9, 0)[0] == "cubin"
    assert mover.choose(container(*older), 10, 0)[0] == "none"
    assert mover.choose(container(*older, *_fat((), (100,))), 10, 0)[0] == "ptx"


def test_images_that_are_no_fat_binary_are_the_code(mover: Mover) -> None:
    code = _source(90, ())
    assert mover.choose(code, 9, 0) == ("cubin", "", code)
    text = image(SOURCE, "ptx", 90)
    assert text.endswith(b"\0")
    assert mover.choose(text + b"behind it", 9, 0) == ("ptx", "", text)


def test_images_that_are_unknown_or_to_be_linked_have_no_code(mover: Mover) -> None:
    form, why, code = mover.choose(container(entry(b"LTO IR..", "none", kind=8)), 9, 0)
    assert (form, why, code) == ("none", "an entry of kind 8 in the fat binary", b"")
    found = mover.choose(container(*_fat((90,))), 9, 0, linked=True)
    why = "the driver links the fat binary's code from relocatable parts"
    assert found == ("none", why, b"")
