"""CUDA C to PTX, and on to machine code, with NVRTC, for tests that run kernels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import nvidia
from cuda.bindings import nvrtc

# NVIDIA's packages of the toolkit, which may lie in several folders: headers and libraries.
PACKAGES = [Path(folder) / "cu13" for folder in nvidia.__path__]


def compile_program(source: str, architecture: str, options: tuple[str, ...]) -> Any:
    """A compiled program, to be destroyed; ValueError with NVRTC's log."""
    includes = [f"-I{package / 'include'}" for package in PACKAGES]
    flags = [f"--gpu-architecture={architecture}", *includes, *options]
    err, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert err == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (err,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    if err != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(program)
        raise ValueError(log.decode())
    return program


@functools.cache
def compile_cuda(source: str, options: tuple[str, ...] = ()) -> str:
    """PTX of CUDA C source for compute capability 8.0."""
    program = compile_program(source, "compute_80", options)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    ptx: str = text.decode()
    return ptx.rstrip("\0")


def assemble(source: str, options: tuple[str, ...] = ()) -> None:
    """Let NVIDIA's assembler judge the PTX of CUDA C source for compute capability 8.0."""
    nvrtc.nvrtcDestroyProgram(compile_program(source, "sm_80", options))
