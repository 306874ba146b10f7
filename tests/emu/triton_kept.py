"""The kept PTX of Triton kernels as kernel cases.

`make triton-kernels` makes it of triton_*.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.emu.kernel_lib import Arguments, Shape, add, u8

FOLDER = Path(__file__).resolve().parent / "triton_ptx"
KEPT: dict[str, Any] = json.loads((FOLDER / "kernels.json").read_text())
# Behind its own parameters a kernel has two pointers to scratch memory, which none of these uses.
SCRATCH = [u8(0), u8(0)]
Make = Callable[[np.random.Generator], Arguments]


def add_triton(name: str, grid: Shape, make: Make) -> None:
    """A case, named after the kernel, from its arguments but the constants."""
    kernel = KEPT["kernels"][name]

    def arguments(rng: np.random.Generator) -> Arguments:
        own = make(rng)
        assert len(own) == len(kernel["signature"]), name
        return [*own, *SCRATCH]

    add(
        f"triton_{name}",
        "",
        grid,
        32 * kernel["warps"],
        arguments,
        entry=kernel["entry"],
        shared=kernel["shared"],
        ptx=(FOLDER / f"{name}.ptx").read_text(),
    )


def triton(grid: Shape, *names: str) -> Callable[[Make], Make]:
    """Registers the function below as the arguments of the kernels, or of that of its name."""

    def register(make: Make) -> Make:
        for name in names or [make.__name__]:
            add_triton(name, grid, make)
        return make

    return register
