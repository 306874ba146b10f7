"""Integrate the gravity system of nbody.py in managed memory; it prints the same lines."""

from __future__ import annotations

import nbody
from _common import guarded
from _cuda import Gpu, check
from cuda.bindings import driver


class ManagedGpu(Gpu):
    def allocated(self, size: int) -> int:
        attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        return int(check(driver.cuMemAllocManaged(size, attach)))


if __name__ == "__main__":
    nbody.Gpu = ManagedGpu  # type: ignore[misc]
    guarded(nbody.main)
