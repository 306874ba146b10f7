"""CUDA C to PTX with NVRTC, for tests that run kernels."""

from __future__ import annotations

import functools
from pathlib import Path

from cuda.bindings import nvrtc

ARCHITECTURE = "compute_80"


@functools.cache
def compile_cuda(source: str, options: tuple[str, ...] = ()) -> str:
    """PTX of CUDA C source; fails with NVRTC's log."""
    include = Path(nvrtc.__file__).resolve().parents[2] / "nvidia" / "cu13" / "include"
    flags = [f"--gpu-architecture={ARCHITECTURE}", f"-I{include}", *options]
    err, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert err == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (err,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    if err != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ValueError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    ptx: str = text.decode()
    return ptx.rstrip("\0")
