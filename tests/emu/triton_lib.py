"""Which Triton kernels are compiled, for which arguments and how (needs Triton).

Their PTX is kept in tests/emu/triton_ptx, so that the tests need none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compiled:
    """One way to compile a kernel. Types are Triton's, by parameter: "*fp32", "i32"; with ":16"
    behind them the argument may be taken for a multiple of 16. Other parameters are constants."""

    function: JITFunction[Any]
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)


KERNELS: dict[str, Compiled] = {}


def compiled(
    types: str,
    *,
    name: str = "",
    warps: int = 4,
    stages: int = 3,
    options: dict[str, Any] | None = None,
    **constants: Any,
) -> Callable[[JITFunction[Any]], JITFunction[Any]]:
    """Adds the kernel below, under its name or another one; `types` of the parameters that are no
    constants, in order."""

    def add(function: JITFunction[Any]) -> JITFunction[Any]:
        key = name or function.__name__
        assert key not in KERNELS, key
        names = [each for each in function.arg_names if each not in constants]
        by_name = dict(zip(names, types.split(), strict=True))
        KERNELS[key] = Compiled(function, by_name, constants, warps, stages, options or {})
        return function

    return add
