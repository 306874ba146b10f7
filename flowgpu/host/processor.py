"""The processor's instructions that programs choose their code by, and keep from then on."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path

# /proc/cpuinfo uses these names (Linux, arch/x86/include/asm/cpufeatures.h). The features left out
# are the kernel's own, or change how fast an instruction is, not whether there is one.
_CHOSEN_BY = re.compile(
    r"(avx|sse|amx_|bmi|v?aes|v?pclmulqdq|xsave|movdir|sha|sm[34]|fma)\w*|pni|ssse3|f16c|abm|"
    r"popcnt|movbe|cx16|lahf_lm|adx|gfni|rdrand|rdseed|rdpid|rtm|hle|xop|tbm|xgetbv1|clwb|"
    r"clflushopt|clzero|serialize|waitpkg|cmpccxadd|apx\w*"
)
_KERNELS_OWN = {"xsaves"}
AMX = "amx_tile"
_AT_MINSIGSTKSZ = 51  # getauxval(3): the signal frame with all registers that there may be


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Names of those that this machine's first processor has, in order."""
    with cpuinfo.open() as lines:  # no further: the kernel asks each processor how fast it is
        flags = next((line for line in lines if line.startswith("flags")), "")
    words = set(flags.partition(":")[2].split()) - _KERNELS_OWN
    return tuple(sorted(word for word in words if _CHOSEN_BY.fullmatch(word)))


def lacking(wanted: Iterable[str]) -> list[str]:
    """The wanted features that this machine does not have."""
    here = features()
    return [name for name in wanted if name not in here]


def signal_frame_bytes() -> int:
    """What a signal stack must have room for in a process that may use every register."""
    return int(ctypes.CDLL(None).getauxval(ctypes.c_ulong(_AT_MINSIGSTKSZ)))
