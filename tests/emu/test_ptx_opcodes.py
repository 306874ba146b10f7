"""Single PTX instructions against their definition in the PTX ISA, on Python integers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_runner import Kernel, run

Array = np.ndarray[Any, Any]
NAN32 = 0x7FFFFFFF
CLASSES = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def execute(text: str, out: int, *inputs: Array, registers: str = "") -> Array:
    """Run `text` once a lane: it reads %a, %b, %c and writes %d, all untyped bits."""
    bits = [x.dtype.itemsize * 8 for x in inputs]
    names = "abc"[: len(inputs)]
    params = ", ".join(f".param .u64 p{n}" for n in "d" + names)
    loads = "".join(
        f"ld.param.u64 %p, [p{n}]; mad.wide.u32 %p, %t, {b // 8}, %p; ld.global.b{b} %{n}, [%p];\n"
        for n, b in zip(names, bits, strict=True)
    )
    declared = "".join(f".reg .b{b} %{n};" for n, b in zip(names, bits, strict=True))
    module = f""".version 9.0
    .target sm_80
    .address_size 64
    .visible .entry k({params}) {{
        .reg .b64 %p; .reg .b32 %t; .reg .pred %q; .reg .b{out * 8} %d; {declared} {registers}
        mov.u32 %t, %tid.x;
        {loads}
        {text}
        ld.param.u64 %p, [pd];
        mad.wide.u32 %p, %t, {out}, %p;
        st.global.b{out * 8} [%p], %d;
        ret;
    }}"""
    result = np.zeros(len(inputs[0]), CLASSES[out])
    Kernel(module, "k").run(1, len(result), [result, *inputs])
    return result


def words(values: list[int], bits: int = 32) -> Array:
    return np.array([v & (1 << bits) - 1 for v in values], f"u{bits // 8}")


EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000]
EDGES += [0xFFFFFFFF, 0xDEADBEEF, 0x12345678, 0xAAAAAAAA]


def triples(seed: int, n: int = 400) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    columns = [rng.integers(0, 1 << 32, n, dtype="u4") for _ in range(3)]
    for column in columns:
        column[: n // 2] = rng.choice(np.array(EDGES, "u4"), n // 2)
    return columns[0], columns[1], columns[2]


def signed(v: int, bits: int = 32) -> int:
    v &= (1 << bits) - 1
    return v - (1 << bits) if v >> (bits - 1) else v


def bfe(a: int, b: int, c: int, is_signed: bool) -> int:
    pos, length = b & 0xFF, c & 0xFF
    sign = 0 if not is_signed or length == 0 else a >> min(pos + length - 1, 31) & 1
    return sum(
        (a >> (pos + i) & 1 if i < length and pos + i <= 31 else sign) << i for i in range(32)
    )


def bfi(a: int, b: int, c: int) -> int:
    pos, length, f = c & 0xFF, c >> 8 & 0xFF, b
    for i in range(length):
        if pos + i <= 31:
            f = f & ~(1 << pos + i) | (a >> i & 1) << pos + i
    return f


def prmt(a: int, b: int, c: int) -> int:
    data, r = b << 32 | a, 0
    for k in range(4):
        sel = c >> 4 * k & 15
        byte = data >> 8 * (sel & 7) & 0xFF
        r |= (0xFF * (byte >> 7) if sel & 8 else byte) << 8 * k
    return r


def div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def dp4a(a: int, b: int, c: int) -> int:
    return c + sum(signed(a >> k, 8) * signed(b >> k, 8) for k in (0, 8, 16, 24))


INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "add.sat.s32 %d, %a, %b;": lambda a, b, c: max(min(signed(a) + signed(b), 2**31 - 1), -(2**31)),
    "mul.hi.s32 %d, %a, %b;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul24.lo.s32 %d, %a, %b;": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "mad24.hi.u32 %d, %a, %b, %c;": lambda a, b, c: ((a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16) + c,
    "mad.hi.u32 %d, %a, %b, %c;": lambda a, b, c: (a * b >> 32) + c,
    "sad.s32 %d, %a, %b, %c;": lambda a, b, c: abs(signed(a) - signed(b)) + c,
    "bfe.u32 %d, %a, %b, %c;": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32 %d, %a, %b, %c;": lambda a, b, c: bfe(a, b, c, True),
    "{.reg .b32 h; shr.u32 h, %c, 8; bfi.b32 %d, %a, %b, %c, h;}": bfi,
    "prmt.b32 %d, %a, %b, %c;": prmt,
    "prmt.b32.f4e %d, %a, %b, %c;": lambda a, b, c: (b << 32 | a) >> 8 * (c & 3),
    "shf.l.wrap.b32 %d, %a, %b, %c;": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.clamp.b32 %d, %a, %b, %c;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "lop3.b32 %d, %a, %b, %c, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %d, %a, %b, %c, 0xE8;": lambda a, b, c: a & b | a & c | b & c,
    "shl.b32 %d, %a, %b;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %d, %a, %b;": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %d, %a, %b;": lambda a, b, c: signed(a) >> min(b, 31),
    "popc.b32 %d, %a;": lambda a, b, c: a.bit_count(),
    "clz.b32 %d, %a;": lambda a, b, c: 32 - a.bit_length(),
    "bfind.u32 %d, %a;": lambda a, b, c: a.bit_length() - 1,
    "bfind.s32 %d, %a;": lambda a, b, c: (~a & 0xFFFFFFFF if a >> 31 else a).bit_length() - 1,
    "bfind.shiftamt.u32 %d, %a;": lambda a, b, c: 32 - a.bit_length() if a else -1,
    "brev.b32 %d, %a;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "cnot.b32 %d, %a;": lambda a, b, c: int(a == 0),
    "dp4a.s32.s32 %d, %a, %b, %c;": dp4a,
    "slct.b32.s32 %d, %a, %b, %c;": lambda a, b, c: a if signed(c) >= 0 else b,
    "set.lt.u32.s32 %d, %a, %b;": lambda a, b, c: -1 if signed(a) < signed(b) else 0,
    "{.reg .pred p, q; setp.ne.u32 q, %c, 0; setp.gt.and.u32 p|q, %a, %b, q;"
    "selp.u32 %d, 2, 0, p; @q add.u32 %d, %d, 1;}": lambda a, b, c: (
        (2 * (a > b) + (a <= b)) if c else 0
    ),
    "{.reg .b32 l; add.cc.u32 l, %a, %b; addc.u32 %d, %c, 0; xor.b32 %d, l, %d;}": lambda a, b, c: (
        (a + b & 0xFFFFFFFF) ^ (c + (a + b >> 32))
    ),
    "{.reg .u32 l;sub.cc.u32 l, %a, %b; subc.u32 %d, %c, %a; xor.b32 %d, %d, l;}": lambda a, b, c: (
        (a - b & 0xFFFFFFFF) ^ (c - a - (a < b) & 0xFFFFFFFF)
    ),
    "{.reg .b32 l, h; mad.lo.cc.u32 l, %a, %b, %c; madc.hi.u32 h, %a, %b, 0; xor.b32 %d, l, h;}": (
        lambda a, b, c: (a * b + c & 0xFFFFFFFF) ^ (a * b + c >> 32)
    ),
    "cvt.sat.s8.s32 %d, %a;": lambda a, b, c: max(min(signed(a), 127), -128),
    "cvt.sat.u16.s32 %d, %a;": lambda a, b, c: max(min(signed(a), 65535), 0),
    "cvt.s32.s8 %d, %a;": lambda a, b, c: signed(a, 8),
    "cvt.u32.u16 %d, %a;": lambda a, b, c: a & 0xFFFF,
    "isspacep.global %q, %p; selp.b32 %d, 1, 0, %q;": lambda a, b, c: 1,
}


@pytest.mark.parametrize("text", INTEGER)
def test_integer_instruction(text: str) -> None:
    a, b, c = triples(len(text))
    got = execute(text, 4, a, b, c)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    want = [INTEGER[text](*row) & 0xFFFFFFFF for row in rows]
    np.testing.assert_array_equal(got, np.array(want, "u4"))


def test_division_by_zero_and_overflow_do_not_trap() -> None:
    a, b = words([5, -5, 0x80000000, 0]), words([0, 0, -1, 0])
    for name in ("div.s32", "div.u32", "rem.s32", "rem.u32"):
        got = execute(f"{name} %d, %a, %b;", 4, a, b)
        assert got[2] == {"div.s32": 0x80000000, "rem.s32": 0, "div.u32": 0}.get(name, 0x80000000)


def bits32(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def float32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def round32(exact: Fraction, mode: str, zero_sign: int) -> int:
    """Bits of the f32 nearest to an exact value in the rounding mode."""
    if exact == 0:
        return zero_sign << 31
    sign, magnitude = int(exact < 0), abs(exact)
    exponent = math.floor(math.log2(magnitude)) if magnitude else 0
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    kept, rest = divmod(magnitude, unit)
    half = rest * 2
    up = {
        "rn": half > unit or (half == unit and kept % 2 == 1),
        "rz": False,
        "rp": rest > 0 and not sign,
        "rm": rest > 0 and sign == 1,
    }[mode]
    value = (kept + up) * unit
    if value >= Fraction(2) ** 128:
        overflows = mode == "rn" or (mode == "rp" and not sign) or (mode == "rm" and sign == 1)
        return sign << 31 | (0x7F800000 if overflows else 0x7F7FFFFF)
    return sign << 31 | bits32(float(value))


FINITE = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800001, 0x7F7FFFFF]
FINITE += [0xFF7FFFFF, 0x3EAAAAAB, 0x4B800001, 0x33800000, 0x34000001, 0xCB7FFFFF]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fused_multiply_add_rounds_once_in_every_mode(mode: str) -> None:
    rng = np.random.default_rng(3)
    columns = []
    for _ in range(3):
        random = rng.integers(0, 1 << 32, 300, dtype="u4")
        random = np.where(random >> 23 & 0xFF == 0xFF, random ^ 0x20000000, random)
        exponents = rng.integers(110, 145, 300, dtype="u4") << 23
        near = random & 0x807FFFFF | exponents
        columns.append(np.concatenate([rng.choice(np.array(FINITE, "u4"), 300), near]))
    a, b, c = (np.asarray(x, "u4") for x in columns)
    got = execute(f"fma.{mode}.f32 %d, %a, %b, %c;", 4, a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        product = Fraction(float32(x)) * Fraction(float32(y))
        exact = product + Fraction(float32(z))
        product_sign = (x ^ y) >> 31
        zero_sign = product_sign if product == 0 and product_sign == z >> 31 else int(mode == "rm")
        assert r == round32(exact, mode, zero_sign), (hex(x), hex(y), hex(z))


SPECIAL = [0, 0x80000000, 1, 0x807FFFFF, 0x3F800000, 0xC0000000, 0x7F800000, 0xFF800000]
SPECIAL += [0x7FC00000, 0xFFC12345, 0x7F800001]


def pairs() -> tuple[Array, Array]:
    grid = np.array([(x, y) for x in SPECIAL for y in SPECIAL], "u4")
    return grid[:, 0].copy(), grid[:, 1].copy()


def flush(bits: int) -> int:
    return bits if bits & 0x7F800000 else bits & 0x80000000


def minimum(x: int, y: int, nan: bool, smaller: bool) -> int:
    a, b = float32(x), float32(y)
    if math.isnan(a) or math.isnan(b):
        if nan or (math.isnan(a) and math.isnan(b)):
            return NAN32
        return y if math.isnan(a) else x
    if a == b:
        return x | y if smaller else x & y
    return x if (a < b) == smaller else y


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_minimum_and_maximum_of_special_values(op: str, nan: str, ftz: str) -> None:
    a, b = pairs()
    got = execute(f"{op}{ftz}{nan}.f32 %d, %a, %b;", 4, a, b)
    for x, y, r in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        x, y = (flush(x), flush(y)) if ftz else (x, y)
        assert r == minimum(x, y, bool(nan), op == "min"), (hex(x), hex(y))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.rn"])
def test_invalid_operations_give_the_canonical_nan(op: str) -> None:
    a, b = pairs()
    got = execute(f"{op}.f32 %d, %a, %b;", 4, a, b)
    nans = (got & 0x7FFFFFFF) > 0x7F800000
    assert nans.any() and np.all(got[nans] == NAN32)


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("op", COMPARE)
def test_comparison_of_special_values(op: str, unordered: bool) -> None:
    a, b = pairs()
    name = op + "u" * unordered
    got = execute(f"setp.{name}.f32 %q, %a, %b; selp.b32 %d, 1, 0, %q;", 4, a, b)
    for x, y, r in zip(map(float32, a), map(float32, b), got.tolist(), strict=True):
        nan = math.isnan(x) or math.isnan(y)
        relation = {"==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y}
        assert r == (unordered if nan else relation[COMPARE[op]])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("setp.num.f32 %q, %a, %a;", [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]),
        ("setp.nan.f32 %q, %a, %a;", [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]),
        ("testp.finite.f32 %q, %a;", [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]),
        ("testp.infinite.f32 %q, %a;", [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]),
        ("testp.subnormal.f32 %q, %a;", [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
        ("testp.normal.f32 %q, %a;", [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_classes_of_special_values(text: str, want: list[int]) -> None:
    got = execute(f"{text} selp.b32 %d, 1, 0, %q;", 4, words(SPECIAL))
    assert got.tolist() == want


def test_saturation_takes_nan_and_negative_values_to_zero() -> None:
    x = words([bits32(v) for v in (-1.0, 0.25, 1.0, 7.0, math.nan, math.inf, -math.inf)])
    got = execute("add.sat.f32 %d, %a, 0f00000000;", 4, x)
    assert got.tolist() == [bits32(v) for v in (0, 0.25, 1, 1, 0, 1, 0)]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_conversion_to_half_in_every_rounding_mode(mode: str) -> None:
    rng = np.random.default_rng(5)
    exponents = rng.integers(127 - 27, 127 + 18, 500, dtype="u4") << 23
    x = rng.integers(0, 1 << 32, 500, dtype="u4") & 0x807FFFFF | exponents
    x[:6] = [0x477FE000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x80000001]
    got = execute(f"cvt.{mode}.f16.f32 %d, %a;", 2, x.astype("u4"))
    every = np.arange(0x7C01, dtype="u2").view("f2").astype("f8")  # up to infinity
    for bits, half in zip(x.tolist(), got.tolist(), strict=True):
        value = float32(bits)
        index = int(np.searchsorted(every, abs(value), side="right")) - 1
        index = min(index, 0x7BFF)
        low, high = float(every[index]), float(every[index + 1]) if index < 0x7BFF else 65536.0
        exact = abs(value) == low
        up = {
            "rn": abs(value) - low > high - abs(value)
            or (abs(value) - low == high - abs(value) and index % 2 == 1),
            "rz": False,
            "rp": not exact and value > 0,
            "rm": not exact and value < 0,
        }[mode]
        assert half == (0x8000 if bits >> 31 else 0) | index + up, hex(bits)


def test_packed_half_conversion_puts_the_first_operand_high() -> None:
    a, b = words([bits32(1.5)]), words([bits32(-2.0)])
    assert execute("cvt.rn.f16x2.f32 %d, %a, %b;", 4, a, b)[0] == 0x3E00C000
    assert execute("cvt.rn.bf16x2.f32 %d, %a, %b;", 4, a, b)[0] == 0x3FC0C000


def test_conversion_of_zero_rounded_down_stays_positive() -> None:
    zero = words([0] * 64)
    assert not execute("cvt.rm.f32.u32 %d, %a;", 4, zero).any()
    assert not execute("cvt.rm.f32.s32 %d, %a;", 4, zero).any()
    assert not execute("cvt.rm.f32.u64 %d, %a;", 4, words([0] * 64, 64)).any()


def test_64_bit_integers_round_once_to_f32() -> None:
    values = [
        2**63 - 1,
        2**62 + 2**38 + 1,
        -(2**63),
        2**40 + 2**16,
        2**40 + 2**16 + 1,
        -(2**54) - 1,
    ]
    for mode in ("rn", "rz", "rm", "rp"):
        got = execute(f"cvt.{mode}.f32.s64 %d, %a;", 4, words(values, 64))
        assert got.tolist() == [round32(Fraction(v), mode, 0) for v in values]
    unsigned = [2**64 - 1, 2**63 + 1, 2**63 + 2**39 + 1]
    for mode in ("rn", "rz", "rm", "rp"):
        got = execute(f"cvt.{mode}.f32.u64 %d, %a;", 4, words(unsigned, 64))
        assert got.tolist() == [round32(Fraction(v), mode, 0) for v in unsigned]


def test_tf32_rounds_to_ten_bits_away_from_zero() -> None:
    x = words([0x3F801000, 0x3F800FFF, 0xBF801000, 0x3F803000])
    got = execute("cvt.rna.tf32.f32 %d, %a;", 4, x)
    assert got.tolist() == [0x3F802000, 0x3F800000, 0xBF802000, 0x3F804000]


def test_half_fused_multiply_add_rounds_once() -> None:
    # 0x3C01 squared is 1 + 2^-9 + 2^-20; the addend decides a tie only together with 2^-20.
    a, b, c = (words([v] * 2, 16) for v in (0x3C01, 0x3C01, 0x1000))
    exact = Fraction(1025, 1024) ** 2 + Fraction(1, 2048)
    got = execute("fma.rn.f16 %d, %a, %b, %c;", 2, a, b, c)
    assert got[0] == 0x3C00 + int((exact - 1) * 1024 + Fraction(1, 2))
    big, tiny = words([0x7BFF], 16), words([0x0001], 16)
    assert execute("fma.rn.f16 %d, %a, %b, %c;", 2, big, words([0x3C00], 16), tiny)[0] == 0x7BFF


def test_vectors_pack_and_unpack() -> None:
    x = words([0x1122334455667788], 64)
    text = "{.reg .b32 l, h; mov.b64 {l, h}, %a; mov.b64 %d, {h, l};}"
    assert execute(text, 8, x)[0] == 0x5566778811223344
    text = "{.reg .b16 e<4>; mov.b64 {e0, e1, e2, e3}, %a; mov.b64 %d, {e3, e2, e1, e0};}"
    assert execute(text, 8, x)[0] == 0x7788556633441122
    y = words([0x11223380])
    text = "{.reg .b8 e<4>; mov.b32 {e0, e1, e2, e3}, %a; mov.b32 %d, {e3, e2, e1, e0};}"
    assert execute(text, 4, y)[0] == 0x80332211
    text = "{.reg .b8 e<2>; mov.b16 {_, e0}, %a; mov.b16 %d, {e0, 5};}"
    assert execute(text, 2, words([0x1234], 16))[0] == 0x0512
    text = "{.reg .s8 e; mov.b32 {e, _, _, _}, %a; cvt.rn.f32.s8 %d, e;}"
    assert execute(text, 4, y).view("f4")[0] == -128


def test_loads_extend_into_wider_registers() -> None:
    x = words([0x80FF], 16)
    text = "{{.reg .b32 r; .local .b16 v; st.local.b16 [v], %a; ld.local.{} %d, [v{}];}}"
    for type_, offset, want in (("s8", "+1", -128), ("u8", "+1", 0x80), ("s16", "", -32513)):
        assert execute(text.format(type_, offset), 8, x)[0] == want & 0xFFFFFFFFFFFFFFFF


def test_indexed_branches_and_nested_scopes() -> None:
    x = words([0, 1, 2, 0])
    text = """{ $list: .branchtargets $one, $two, $three; brx.idx %a, $list;
        $one: mov.u32 %d, 10; bra.uni $end;
        $two: { .reg .u32 x; mov.u32 x, 20; mov.u32 %d, x; bra $skip; mov.u32 %d, 0; $skip: }
        bra $end;
        $three: mov.u32 %d, 30;
        $end: }"""
    assert execute(text, 4, x).tolist() == [10, 20, 30, 10]


def test_text_as_triton_writes_it() -> None:
    out = np.zeros(128, "f4")
    text = """//
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u32 k_param_1)
.reqntid 128
{
    .reg .pred %p<3>; .reg .b32 %r<10>; .reg .b64 %rd<4>;
    .loc 1 5 0
$L__func_begin0:
    ld.param.b64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.b32 %r3, global_smem;
    add.s32 %r4, %r3, %r2;
    cvt.rn.f32.s32 %r5, %r1;
    setp.lt.u32 %p1, %r1, 128;
    @%p1 st.shared.v1.b32 [ %r4 + 0 ], { %r5 };
    bar.sync 0;
    ld.shared.b32 %r6, [ %r4 + 0 ];
    cvt.s64.s32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    createpolicy.fractional.L2::evict_last.b64 %rd2, 1.0;
    // begin inline asm
    @%p1 st.global.L1::evict_last.L2::cache_hint.b32 [ %rd3 + 0 ], { %r6 }, %rd2;
    // end inline asm
    ret;
$L__tmp1:
$L__func_end0:
}
.file 1 "/a/b.py"
.section .debug_abbrev { .b8 1 .b8 17 }
"""
    Kernel(text.replace(".v1", ""), "k").run(1, 128, [out, np.int32(0)], shared=512)
    np.testing.assert_array_equal(out, np.arange(128, dtype="f4"))


def test_asynchronous_copies_fill_shared_memory() -> None:
    x, out = np.arange(256, dtype="f4"), np.zeros(256, "f4")
    run(
        """extern "C" __global__ void k(float* o, const float* x) {
            __shared__ __align__(16) float s[256];
            int t = threadIdx.x;
            unsigned a = (unsigned)__cvta_generic_to_shared(s + 4 * t);
            int bytes = t == 5 ? 8 : 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                :: "r"(a), "l"(x + 4 * t), "r"(bytes));
            asm volatile("cp.async.commit_group;");
            asm volatile("cp.async.wait_group 0;");
            __syncthreads();
            for (int i = 0; i < 4; ++i) o[4 * t + i] = s[4 * t + i];
        }""",
        "k", 1, 64, [out, x],
    )  # fmt: skip
    x[22:24] = 0
    np.testing.assert_array_equal(out, x)


MATRIX = """
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(float* d, const unsigned short* a, const unsigned short* b) {
    __shared__ __align__(16) unsigned short sa[16][16], sb[16][8];
    int t = threadIdx.x, g = t / 4, q = t % 4 * 2;
    for (int i = t; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (int i = t; i < 128; i += 32) sb[i / 8][i % 8] = b[i];
    __syncwarp();
    unsigned x[4], y[2];
    float c[4] = {1, 2, 3, 4};
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at(&sa[t % 16][t / 16 * 8])));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
        : "=r"(y[0]), "=r"(y[1]) : "r"(at(&sb[t % 16][0])));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    d[g * 8 + q] = c[0]; d[g * 8 + q + 1] = c[1];
    d[(g + 8) * 8 + q] = c[2]; d[(g + 8) * 8 + q + 1] = c[3];
}"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_multiplication_of_a_warp(kind: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-8, 9, shape).astype("f4") for shape in ((16, 16), (16, 8)))

    def encode(x: Array) -> Array:
        return x.astype("f2").view("u2") if kind == "f16" else (x.view("u4") >> 16).astype("u2")

    out = np.zeros((16, 8), "f4")
    run(MATRIX.replace("TYPE", kind), "k", 1, 32, [out, encode(a), encode(b)])
    start = np.tile(np.array([1, 2], "f4"), (16, 4))
    start[8:] += 2
    np.testing.assert_array_equal(out, a @ b + start)


def test_matrix_multiplication_in_tf32() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, shape).astype("f4") for shape in ((16, 8), (8, 8)))
    out = np.zeros((16, 8), "f4")
    run(
        """extern "C" __global__ void k(float* d, const unsigned* a, const unsigned* b) {
            int g = threadIdx.x / 4, q = threadIdx.x % 4;
            float c[4];
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                : "r"(a[g * 8 + q]), "r"(a[(g + 8) * 8 + q]), "r"(a[g * 8 + q + 4]),
                  "r"(a[(g + 8) * 8 + q + 4]), "r"(b[q * 8 + g]), "r"(b[(q + 4) * 8 + g]),
                  "f"(0.5f));
            d[g * 8 + 2 * q] = c[0]; d[g * 8 + 2 * q + 1] = c[1];
            d[(g + 8) * 8 + 2 * q] = c[2]; d[(g + 8) * 8 + 2 * q + 1] = c[3];
        }""",
        "k", 1, 32, [out, a, b],
    )  # fmt: skip
    np.testing.assert_array_equal(out, a @ b + np.float32(0.5))


# Random integer expressions: text for NVRTC beside its value in numpy, 32 bits, wrapping.
LEAVES = st.one_of(
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 2**32 - 1).map(lambda v: f"{v}u"),
)
BINARY = ["+", "-", "*", "&", "|", "^", "<<", ">>", "/", "%", "<", "==", "max", "min", "mulhi"]
EXPRESSIONS: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(BINARY), inner, inner),
        st.tuples(st.sampled_from(["~", "neg", "popc", "clz", "brev"]), inner),
        st.tuples(st.just("?"), inner, inner, inner),
    ),
    max_leaves=12,
)


def source_of(e: Any) -> str:
    if isinstance(e, str):
        return e
    op, args = e[0], [source_of(x) for x in e[1:]]
    if op in ("<<", ">>"):
        return f"({args[0]} {op} ({args[1]} & 31u))"
    if op in ("/", "%"):
        return f"({args[0]} {op} ({args[1]} | 1u))"
    if op in ("<", "=="):
        return f"(unsigned)({args[0]} {op} {args[1]})"
    calls = {"max": "max", "min": "min", "mulhi": "__umulhi", "popc": "(unsigned)__popc",
             "clz": "(unsigned)__clz", "brev": "__brev"}  # fmt: skip
    if op in calls:
        return f"{calls[op]}({', '.join(args)})"
    if op == "?":
        return f"(({args[0]}) & 1u ? {args[1]} : {args[2]})"
    if op in ("~", "neg"):
        return f"({'~' if op == '~' else '0u -'} {args[0]})"
    return f"({args[0]} {op} {args[1]})"


def value_of(e: Any, env: dict[str, int]) -> int:
    if isinstance(e, str):
        return env[e] if e in env else int(e[:-1])
    x = [value_of(part, env) for part in e[1:]]
    two = [*x, 0]
    return {
        "+": lambda: x[0] + x[1], "-": lambda: x[0] - x[1], "*": lambda: x[0] * x[1],
        "&": lambda: x[0] & x[1], "|": lambda: x[0] | x[1], "^": lambda: x[0] ^ x[1],
        "<<": lambda: x[0] << (x[1] & 31), ">>": lambda: x[0] >> (x[1] & 31),
        "/": lambda: x[0] // (x[1] | 1), "%": lambda: x[0] % (x[1] | 1),
        "<": lambda: int(x[0] < x[1]), "==": lambda: int(x[0] == x[1]),
        "max": lambda: max(two[:2]), "min": lambda: min(two[:2]),
        "mulhi": lambda: x[0] * x[1] >> 32, "~": lambda: ~x[0], "neg": lambda: -x[0],
        "popc": lambda: x[0].bit_count(), "clz": lambda: 32 - x[0].bit_length(),
        "brev": lambda: int(f"{x[0]:032b}"[::-1], 2),
        "?": lambda: x[1] if x[0] & 1 else x[2],
    }[e[0]]() & 0xFFFFFFFF  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(EXPRESSIONS, min_size=4, max_size=4))
def test_random_integer_expressions(expressions: list[Any]) -> None:
    a, b, c = triples(11, 64)
    stores = "".join(f"o[{64 * k} + t] = {source_of(e)};\n" for k, e in enumerate(expressions))
    source = f"""extern "C" __global__ void k(unsigned* o, const unsigned* pa, const unsigned* pb,
        const unsigned* pc) {{
        int t = threadIdx.x; unsigned a = pa[t], b = pb[t], c = pc[t];
        {stores}
    }}"""
    out = np.zeros((len(expressions), 64), "u4")
    run(source, "k", 1, 64, [out, a, b, c])
    for row, expression in zip(out.tolist(), expressions, strict=True):
        for got, x, y, z in zip(row, a.tolist(), b.tolist(), c.tolist(), strict=True):
            assert got == value_of(expression, {"a": x, "b": y, "c": z}), source_of(expression)
