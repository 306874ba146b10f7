"""The driver calls that the measuring programs share."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver


def check(result: tuple[Any, ...]) -> Any:
    """What a call returned beside its status. Ends the program unless that is success."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"the driver says {result[0].name}")
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def context(ordinal: int = 0) -> Any:
    """The device, with its primary context current."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(ordinal))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    return device
