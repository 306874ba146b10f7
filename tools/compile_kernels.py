#!/usr/bin/env python3
"""Compile a CUDA C file to PTX with NVRTC: `compile_kernels.py SOURCE OUTPUT [HEADER...]`."""

from __future__ import annotations

import functools
import operator
import re
import sys
from pathlib import Path

try:
    from cuda.bindings import nvrtc
except ImportError as error:
    sys.exit(f"compile_kernels: {error}: run `make setup`, or install cuda-bindings")

# The oldest that NVRTC 13 compiles for; the driver compiles the PTX for the GPU at hand.
OPTIONS = ("--gpu-architecture=compute_75", "--std=c++17")
# A driver refuses PTX of a newer version than its own, and NVRTC writes its own version whatever
# the program uses. This is the first that has compute_75.
PTX_VERSION = "6.3"


def compile_ptx(source: Path, headers: list[Path], defines: tuple[str, ...] = ()) -> str:
    """PTX of `source`, which includes `headers` by their names; `defines` are NAME=VALUE.

    Raises ValueError with the compiler's messages.
    """
    err, program = nvrtc.nvrtcCreateProgram(
        source.read_bytes(),
        source.name.encode(),
        len(headers),
        [header.read_bytes() for header in headers],
        [header.name.encode() for header in headers],
    )
    if err != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(f"nvrtcCreateProgram: {err.name}")
    flags = [flag.encode() for flag in (*OPTIONS, *(f"-D{define}" for define in defines))]
    (err,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if err != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ValueError(log.decode().rstrip("\0"))
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    ptx, changed = re.subn(
        r"^\.version .*$", f".version {PTX_VERSION}", text.decode().rstrip("\0"), flags=re.MULTILINE
    )
    if changed != 1:
        raise ValueError("the PTX has no version, or several")
    return ptx


def constants(header: Path, defines: tuple[str, ...] = ()) -> dict[str, int]:
    """The numbers that `header` defines, by name, with `defines` before them."""
    values = {name: int(number) for name, number in (text.split("=") for text in defines)}
    for name, words in re.findall(r"^#define (\w+) (.+)$", header.read_text(), re.MULTILINE):
        terms = [values.get(word) or int(word) for word in words.strip("()").split(" / ")]
        values.setdefault(name, functools.reduce(operator.floordiv, terms))
    return values


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, output, *headers = map(Path, sys.argv[1:])
    try:
        text = compile_ptx(source, headers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
