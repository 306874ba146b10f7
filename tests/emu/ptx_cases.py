"""Helpers of the kernel tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_runner import run

Array = np.ndarray[Any, Any]
NO_FMA = ("--fmad=false",)
f4, f8, i4, u4, i8 = np.float32, np.float64, np.int32, np.uint32, np.int64


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(n: int, seed: int = 1) -> Array:
    return (rng(seed).standard_normal(n) * 10).astype(f4)


def same(got: Array, want: Array) -> None:
    """Equal bits; NaNs of any payload are equal."""
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    if got.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def elementwise(body: str, n: int, out: Array, *inputs: Array, block: int = 128, **kw: Any) -> None:
    """Run `out[i] = body` over i; inputs are named a, b, c."""
    types = {
        "f4": "float", "f8": "double", "i4": "int", "u4": "unsigned", "i8": "long long",
        "u8": "unsigned long long", "i2": "short", "u2": "unsigned short", "u1": "unsigned char",
        "i1": "signed char",
    }  # fmt: skip
    names = [types[x.dtype.str[1:]] for x in (out, *inputs)]
    params = "".join(f", const {t}* {v}" for t, v in zip(names[1:], "abc", strict=False))
    prelude = kw.pop("prelude", "")
    source = f"""{prelude}
    extern "C" __global__ void k({names[0]}* out, int n{params}) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = {body};
    }}"""
    run(source, "k", (n + block - 1) // block, block, [out, i4(n), *inputs], **kw)
