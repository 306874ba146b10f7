"""Let heat spread in a plate that is read by textures and written by surfaces; numpy must agree."""

from __future__ import annotations

from typing import Any

import numpy as np
from _common import Options, Report, digest, guarded, parse, verify
from _cuda import Gpu, check
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
LEVELS = 3

SOURCE = r"""
// Outside of the plate it is as warm as at its border: the texture's address mode.
extern "C" __global__ void spread(unsigned long long from, unsigned long long rates,
                                  unsigned long long to, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width)
        return;
    float at = tex2D<float>(from, x + 0.5f, y + 0.5f);
    float around = __fadd_rn(
        __fadd_rn(tex2D<float>(from, x - 0.5f, y + 0.5f), tex2D<float>(from, x + 1.5f, y + 0.5f)),
        __fadd_rn(tex2D<float>(from, x + 0.5f, y - 0.5f), tex2D<float>(from, x + 0.5f, y + 1.5f)));
    float change = __fmul_rn(tex1Dfetch<float>(rates, y), __fsub_rn(around, __fmul_rn(4.0f, at)));
    surf2Dwrite(__fadd_rn(at, change), to, x * 4, y);
}
"""

Floats = NDArray[np.float32]


def texture(resource: Any) -> int:
    about = driver.CUDA_TEXTURE_DESC()
    about.addressMode = [driver.CUaddress_mode.CU_TR_ADDRESS_MODE_CLAMP] * 3
    return int(check(driver.cuTexObjectCreate(resource, about, None)))


def of_array(array: Any) -> Any:
    resource = driver.CUDA_RESOURCE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    resource.res.array.hArray = array
    return resource


def of_memory(address: int, count: int) -> Any:
    resource = driver.CUDA_RESOURCE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    resource.res.linear.devPtr, resource.res.linear.sizeInBytes = address, 4 * count
    resource.res.linear.format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    resource.res.linear.numChannels = 1
    return resource


def described(shape: tuple[int, ...], flags: int = 0) -> Any:
    """Floats of (height, width), or of (depth, height, width)."""
    about = driver.CUDA_ARRAY3D_DESCRIPTOR()
    about.Height, about.Width = shape[-2:]
    about.Depth = shape[0] if len(shape) == 3 else 0
    about.Format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    about.NumChannels, about.Flags = 1, flags
    return about


def copy(array: Any, values: Floats, *, back: bool = False) -> Floats:
    """Copy all of an array from `values`, or to them; gives them."""
    ends = driver.CUmemorytype
    params = driver.CUDA_MEMCPY3D()
    if back:
        params.srcMemoryType, params.srcArray = ends.CU_MEMORYTYPE_ARRAY, array
        params.dstMemoryType, params.dstHost = ends.CU_MEMORYTYPE_HOST, values.ctypes.data
    else:
        params.srcMemoryType, params.srcHost = ends.CU_MEMORYTYPE_HOST, values.ctypes.data
        params.dstMemoryType, params.dstArray = ends.CU_MEMORYTYPE_ARRAY, array
    height, width = values.shape[-2:]
    params.srcPitch = params.dstPitch = params.WidthInBytes = 4 * width
    params.srcHeight = params.dstHeight = params.Height = height
    params.Depth = values.size // (height * width)
    check(driver.cuMemcpy3D(params))
    return values


class Plate:
    """Its heat in two arrays that take turns, and arrays of other kinds."""

    def __init__(self, gpu: Gpu, options: Options) -> None:
        side = 1024 if options.big else 64
        rng = np.random.default_rng([options.seed, 9])
        self.heat = rng.random((side, side), np.float32)
        self.rates = (rng.random(side, np.float32) * np.float32(0.25)).astype(np.float32)
        self.gpu = gpu
        self.module = gpu.module(SOURCE)
        self.spread = self.module.kernel("spread", "QQQii")
        surface = 2  # CUDA_ARRAY3D_SURFACE_LDST
        self.arrays = [
            check(driver.cuArray3DCreate(described((side, side), surface))) for _ in range(2)
        ]
        copy(self.arrays[0], self.heat)
        copy(self.arrays[1], self.heat)
        self.table = texture(of_memory(gpu.upload(self.rates), side))
        self.surfaces = [int(check(driver.cuSurfObjectCreate(of_array(a)))) for a in self.arrays]
        self.volume = rng.random((5, 7, 33), np.float32)
        self.deep = check(driver.cuArray3DCreate(described(self.volume.shape)))
        copy(self.deep, self.volume)
        self.pyramid = check(driver.cuMipmappedArrayCreate(described((side, side)), LEVELS))
        self.levels = [rng.random((side >> n, side >> n), np.float32) for n in range(LEVELS)]
        for number, values in enumerate(self.levels):
            copy(self.level(number), values)

    def level(self, number: int) -> Any:
        return check(driver.cuMipmappedArrayGetLevel(self.pyramid, number))

    def step(self, number: int) -> None:
        """One of the arrays becomes the other's next step. Its texture has a number of its own."""
        source, target = self.arrays[number % 2], self.surfaces[(number + 1) % 2]
        in_the_way = [texture(of_array(self.deep)) for _ in range(number % 3)]
        seen = texture(of_array(source))
        for one in in_the_way:
            check(driver.cuTexObjectDestroy(one))
        height, width = self.heat.shape
        grid = ((width + 63) // 64, height, 1)
        self.spread(grid, 64, seen, self.table, target, width, height)
        check(driver.cuCtxSynchronize())
        check(driver.cuTexObjectDestroy(seen))
        self.levels[number % LEVELS] += np.float32(1)
        copy(self.level(number % LEVELS), self.levels[number % LEVELS])

    def expected(self) -> Floats:
        """The next step by numpy, in the order of the kernel's operations."""
        at = self.heat
        wide = np.pad(at, 1, mode="edge")
        sides = wide[1:-1, :-2] + wide[1:-1, 2:]
        around = sides + (wide[:-2, 1:-1] + wide[2:, 1:-1])
        result: Floats = at + self.rates[:, None] * (around - np.float32(4) * at)
        return result

    def contents(self) -> list[Floats]:
        arrays = [(array, self.heat) for array in self.arrays] + [(self.deep, self.volume)]
        arrays += [(self.level(number), values) for number, values in enumerate(self.levels)]
        return [copy(array, np.empty_like(like), back=True) for array, like in arrays]

    def close(self) -> None:
        for one in self.surfaces:
            check(driver.cuSurfObjectDestroy(one))
        check(driver.cuTexObjectDestroy(self.table))
        for array in (*self.arrays, self.deep):
            check(driver.cuArrayDestroy(array))
        check(driver.cuMipmappedArrayDestroy(self.pyramid))


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    plate = Plate(gpu, options)
    for step in range(options.steps):
        before = digest(*plate.contents())
        plate.step(step)
        contents = plate.contents()
        plate.heat = plate.expected()
        found = contents[(step + 1) % 2]
        verify(bool((found == plate.heat).all()), f"step {step} is not what numpy has")
        for kept, like in zip(contents[2:], [plate.volume, *plate.levels], strict=True):
            verify(bool((kept == like).all()), f"an array has changed by step {step}")
        report.step(step, digest(before.encode(), *contents))
    plate.close()
    plate.module.unload()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)
