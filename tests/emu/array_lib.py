"""Short names for what the driver says about arrays, texture and surface objects."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import ok

F32 = cu.CUarray_format.CU_AD_FORMAT_FLOAT
U8 = cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
LAYERED, SURFACE, CUBEMAP, GATHER = 1, 2, 4, 8
ARRAY, DEVICE = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
HOST = cu.CUmemorytype.CU_MEMORYTYPE_HOST
FORMATS = {
    "u1": U8,
    "u2": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT16,
    "u4": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32,
    "i1": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT8,
    "i2": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT16,
    "i4": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT32,
    "f2": cu.CUarray_format.CU_AD_FORMAT_HALF,
    "f4": F32,
}


def shape(
    width: int, height: int = 0, depth: int = 0, kind: Any = F32, channels: int = 1, flags: int = 0
) -> Any:
    about = cu.CUDA_ARRAY3D_DESCRIPTOR()
    about.Width, about.Height, about.Depth = width, height, depth
    about.Format, about.NumChannels, about.Flags = kind, channels, flags
    return about


def plane(width: int, height: int = 0, kind: Any = F32, channels: int = 1) -> Any:
    about = cu.CUDA_ARRAY_DESCRIPTOR()
    about.Width, about.Height, about.Format, about.NumChannels = width, height, kind, channels
    return about


def told(array: Any) -> tuple[Any, ...]:
    """What the driver says of an array: as cuArray3DCreate has it."""
    about = ok(cu.cuArray3DGetDescriptor(array))
    flags = about.Flags
    return about.Width, about.Height, about.Depth, about.Format, about.NumChannels, flags


def solid(
    array: Any, address: int, size: tuple[int, int, int], back: bool = False, pitch: int = 0
) -> Any:
    """A copy of (bytes, rows, slices) between memory and an array's beginning."""
    copy = cu.CUDA_MEMCPY3D()
    width, height, depth = size
    if back:
        copy.srcMemoryType, copy.srcArray = ARRAY, array
        copy.dstMemoryType, copy.dstDevice = DEVICE, address
        copy.dstPitch, copy.dstHeight = pitch or width, height
    else:
        copy.dstMemoryType, copy.dstArray = ARRAY, array
        copy.srcMemoryType, copy.srcDevice = DEVICE, address
        copy.srcPitch, copy.srcHeight = pitch or width, height
    copy.WidthInBytes, copy.Height, copy.Depth = width, height, depth
    return copy


def of_host(array: Any, data: Any, back: bool = False) -> Any:
    """The same for the whole of a host array of bytes, (slices, rows, bytes)."""
    copy = cu.CUDA_MEMCPY3D()
    depth, height, width = data.shape
    if back:
        copy.srcMemoryType, copy.srcArray = ARRAY, array
        copy.dstMemoryType, copy.dstHost = HOST, data.ctypes.data
        copy.dstPitch, copy.dstHeight = width, height
    else:
        copy.dstMemoryType, copy.dstArray = ARRAY, array
        copy.srcMemoryType, copy.srcHost = HOST, data.ctypes.data
        copy.srcPitch, copy.srcHeight = width, height
    copy.WidthInBytes, copy.Height, copy.Depth = width, height, depth
    return copy


def as_bytes(data: Any) -> Any:
    """Elements (slices, rows, columns[, channels]) as bytes (slices, rows, bytes)."""
    whole = np.ascontiguousarray(data)
    return whole.reshape(*whole.shape[:2], -1).view(np.uint8)


def filled(data: Any, flags: int = 0, layered: bool = False) -> Any:
    """An array with these elements: (columns,), (rows, columns) or (slices, rows, columns), and
    the channels last, 1, 2 or 4; `layered`: (layers, columns) or (layers, rows, columns)."""
    *extents, channels = data.shape
    if layered and len(extents) == 2:
        extents.insert(1, 0)
    depth, height, width = [0, 0, 0, *extents][-3:]
    kind = FORMATS[data.dtype.str[1:]]
    about = shape(width, height, depth, kind, channels, flags | (LAYERED if layered else 0))
    array = ok(cu.cuArray3DCreate(about))
    content = as_bytes(data.reshape(max(depth, 1), max(height, 1), width, channels))
    ok(cu.cuMemcpy3D(of_host(array, content)))
    return array


def content(array: Any) -> Any:
    """All bytes of an array (slices, rows, bytes)."""
    width, height, depth, kind, channels, _ = told(array)
    (size,) = (np.dtype(name).itemsize for name, one in FORMATS.items() if one == kind)
    data = np.zeros((max(depth, 1), max(height, 1), width * size * channels), np.uint8)
    ok(cu.cuMemcpy3D(of_host(array, data, back=True)))
    return data


def of_array(array: Any) -> Any:
    resource = cu.CUDA_RESOURCE_DESC()
    resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    resource.res.array.hArray = array
    return resource


def of_mipmap(mipmap: Any) -> Any:
    resource = cu.CUDA_RESOURCE_DESC()
    resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    resource.res.mipmap.hMipmappedArray = mipmap
    return resource


def of_memory(address: int, size: int, kind: Any = F32, channels: int = 1) -> Any:
    resource = cu.CUDA_RESOURCE_DESC()
    resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    about = resource.res.linear
    about.devPtr, about.sizeInBytes = address, size
    about.format, about.numChannels = kind, channels
    return resource


def of_pitch(
    address: int, width: int, height: int, pitch: int, kind: Any = F32, channels: int = 1
) -> Any:
    resource = cu.CUDA_RESOURCE_DESC()
    resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_PITCH2D
    about = resource.res.pitch2D
    about.devPtr, about.width, about.height, about.pitchInBytes = address, width, height, pitch
    about.format, about.numChannels = kind, channels
    return resource


def sampling(
    mode: str = "CLAMP", *, linear: bool = False, flags: int = 0, border: float = 0.0
) -> Any:
    """`flags`: 1 integers as they are, 2 normalised coordinates."""
    how = cu.CUDA_TEXTURE_DESC()
    how.addressMode = [getattr(cu.CUaddress_mode, f"CU_TR_ADDRESS_MODE_{mode}")] * 3
    how.filterMode = cu.CUfilter_mode(int(linear))
    how.flags = flags
    how.borderColor = [border] * 4
    return how


def texture(resource: Any, how: Any = None, view: Any = None) -> int:
    return int(ok(cu.cuTexObjectCreate(resource, how or sampling(), view)))


def surface(resource: Any) -> int:
    return int(ok(cu.cuSurfObjectCreate(resource)))
