"""Operations on memory: allocations, host memory, copies, pools, mappings. See program_lib."""

from __future__ import annotations

import ctypes
import os
import zlib

from tests.emu.program_lib import RECTANGLE, SCRATCH, SUCCESS, Objects, Trace, pages

FILL = 0xA5  # new memory is undefined, so it is filled before a program may look at it
U64, U32, I32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32

# CU_POINTER_ATTRIBUTE_*: the type of each answer, and what it is relative to.
ATTRIBUTES = {
    "context": (1, U64, "context"),
    "type": (2, U32, ""),
    "device": (3, U64, "address"),
    "host": (4, U64, "address"),
    "managed": (8, ctypes.c_uint8, ""),
    "ordinal": (9, I32, ""),
    "start": (11, U64, "address"),
    "size": (12, U64, ""),
    "mapped": (13, ctypes.c_uint8, ""),
    "handles": (14, U64, ""),
    "access": (16, U32, ""),
    "pool": (17, U64, "null"),
}


class Location(ctypes.Structure):
    _fields_ = (("type", I32), ("id", I32))


class Properties(ctypes.Structure):
    """What CUmemAllocationProp and CUmemPoolProps begin with."""

    _fields_ = (
        ("type", I32),
        ("handles", I32),
        ("location", Location),
        ("windows", ctypes.c_void_p),
    )


class MemoryProperties(Properties):
    """CUmemAllocationProp."""

    _fields_ = (("flags", ctypes.c_uint8 * 8),)


class PoolProperties(Properties):
    """CUmemPoolProps."""

    _fields_ = (("most", ctypes.c_size_t), ("reserved", ctypes.c_uint8 * 56))


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", U32))


ENDS = ("x", "y", "type", "host", "device", "array", "pitch")


class Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"{side}{name}", U64) for side in ("src", "dst") for name in ENDS),
        ("width", U64),
        ("height", U64),
    )


def properties(device: int, handles: int) -> MemoryProperties:
    return MemoryProperties(type=1, handles=handles, location=Location(1, device))


class MemoryOperations(Objects):
    # -- allocations

    def filled(self, trace: Trace, kind: str, size: int) -> Trace:
        if trace[0] == SUCCESS:
            self.call("cuMemsetD8_v2", self.made[kind][-1], FILL, size)
            self.settle()
        return trace

    def op_alloc(self, size: int) -> Trace:
        return self.filled(self.make("m", "cuMemAlloc_v2", size, size=size), "m", size)

    def op_alloc_null(self) -> Trace:
        return [self.call("cuMemAlloc_v2", 0, 16)]

    def op_alloc_pitch(self, width: int, height: int, element: int) -> Trace:
        pitch = U64(0)
        trace = self.make("m", "cuMemAllocPitch_v2", ctypes.byref(pitch), width, height, element)
        self.sizes["m"][-1] = pitch.value * height
        self.filled(trace, "m", pitch.value * height)
        return [*trace, pitch.value] if trace[0] == SUCCESS else trace

    def op_free(self, where: Trace) -> Trace:
        """Free memory. For stream-ordered memory the driver does not wait for work that uses it."""
        self.settle()
        return [self.call("cuMemFree_v2", self.address(where))]

    def op_range(self, where: Trace) -> Trace:
        address, base, size = self.address(where), U64(0), U64(0)
        code = self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return [code, address - base.value, size.value] if code == SUCCESS else [code]

    def op_attribute(self, name: str, where: Trace) -> Trace:
        key, kind, relative = ATTRIBUTES[name]
        address = self.address(where)
        code, value = self.ask(kind, "cuPointerGetAttribute", key, address)
        if code != SUCCESS:
            return [code]
        if relative == "context":
            return [code, self.number("ctx", value)]
        if relative == "address":
            return [code, value - address]
        return [code, int(value != 0) if relative == "null" else value]

    def op_attributes(self, where: Trace) -> Trace:
        """Several at once, which answers zero for what is not there."""
        names = ("type", "ordinal", "managed", "size")
        keys = (I32 * len(names))(*(ATTRIBUTES[name][0] for name in names))
        values = [ATTRIBUTES[name][1](77) for name in names]
        data = (ctypes.c_void_p * len(names))(*map(ctypes.addressof, values))
        code = self.call("cuPointerGetAttributes", len(names), keys, data, self.address(where))
        return [code, *(value.value for value in values)] if code == SUCCESS else [code]

    def op_info(self) -> Trace:
        free, total = U64(0), U64(0)
        code = self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return [code, 0 < free.value < total.value] if code == SUCCESS else [code]

    # -- host memory

    def op_host_alloc(self, size: int, flags: int) -> Trace:
        trace = self.make("h", "cuMemHostAlloc", size, flags, size=size)
        if trace[0] == SUCCESS:
            ctypes.memset(self.made["h"][-1], FILL, size)
        return trace

    def op_host_register(self, size: int, offset: int, flags: int) -> Trace:
        """Memory of the process; `offset` away from the begin of a page."""
        memory = self.keep(pages(max(4096, min(size, SCRATCH) + offset)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset
        self.made["h"].append(address)
        self.sizes["h"].append(size)
        return [self.call("cuMemHostRegister_v2", address, size, flags)]

    def op_host_register_again(self, where: Trace, size: int) -> Trace:
        return [self.call("cuMemHostRegister_v2", self.address(where), size, 0)]

    def op_host_unregister(self, where: Trace) -> Trace:
        return [self.call("cuMemHostUnregister", self.address(where))]

    def op_host_free(self, where: Trace) -> Trace:
        return [self.call("cuMemFreeHost", self.address(where))]

    def op_host_flags(self, where: Trace) -> Trace:
        return self.answer(U32, "cuMemHostGetFlags", self.address(where))

    # -- copies

    def op_h2d(self, to: Trace, source: Trace, size: int, stream: int | None) -> Trace:
        return self.copy("HtoD", self.address(to), self.host(source), size, stream)

    def op_d2d(self, to: Trace, source: Trace, size: int, stream: int | None) -> Trace:
        return self.copy("DtoD", self.address(to), self.address(source), size, stream)

    def op_unified(self, to: Trace, source: Trace, size: int, stream: int | None) -> Trace:
        return self.copy("", self.host(to, True), self.host(source), size, stream)

    def op_d2h(self, to: Trace, source: Trace, size: int, stream: int | None) -> Trace:
        target = self.host(to, True)
        trace = self.copy("DtoH", target, self.address(source), size, stream)
        if trace[0] != SUCCESS or size == 0:
            return trace
        self.settle()
        return [*trace, zlib.crc32(ctypes.string_at(target, size))]

    def copy(self, way: str, to: int, source: int, size: int, stream: int | None) -> Trace:
        name = f"cuMemcpy{way}"
        version = "_v2" if way else ""
        if stream is None:
            self.settle()
            return [self.call(f"{name}{version}", to, source, size)]
        trace = [self.call(f"{name}Async{version}", to, source, size, self.on_stream(stream))]
        self.after_work(stream)
        return trace

    def op_read(self, where: Trace, size: int) -> Trace:
        """The bytes of device memory, once all is done."""
        self.settle()
        return self.op_d2h(["b", 0, 0], where, size, None)

    def op_set(self, bits: int, where: Trace, value: int, count: int, stream: int | None) -> Trace:
        address = self.address(where)
        if stream is None:
            self.settle()
            return [self.call(f"cuMemsetD{bits}_v2", address, value, count)]
        handle = self.on_stream(stream)
        trace = [self.call(f"cuMemsetD{bits}Async", address, value, count, handle)]
        self.after_work(stream)
        return trace

    def op_set2d(
        self, bits: int, where: Trace, pitch: int, value: int, width: int, height: int
    ) -> Trace:
        self.settle()
        name = f"cuMemsetD2D{bits}_v2"
        return [self.call(name, self.address(where), pitch, value, width, height)]

    def op_copy2d(
        self, way: str, to: Trace, source: Trace, width: int, height: int, stream: int | None
    ) -> Trace:
        """Each end is [address, pitch, x, y]."""
        rectangle = Rectangle(width=width, height=height)
        bounce = 0
        for side, (where, pitch, x, y) in (("src", source), ("dst", to)):
            on_host = way[0 if side == "src" else -1] == "h"
            address = self.host(where, side == "dst") if on_host else self.address(where)
            setattr(rectangle, f"{side}type", 1 if on_host else 2)
            setattr(rectangle, f"{side}{'host' if on_host else 'device'}", address)
            for name, value in (("pitch", pitch), ("x", x), ("y", y)):
                setattr(rectangle, f"{side}{name}", value)
            bounce = address if on_host and side == "dst" else bounce
        self.keep(rectangle)
        if stream is None:
            self.settle()
            code = self.call("cuMemcpy2D_v2", ctypes.byref(rectangle))
        else:
            handle = self.on_stream(stream)
            code = self.call("cuMemcpy2DAsync_v2", ctypes.byref(rectangle), handle)
            self.after_work(stream)
        if code != SUCCESS or not bounce:
            return [code]
        self.settle()
        return [code, zlib.crc32(ctypes.string_at(bounce, RECTANGLE))]

    # -- stream-ordered memory

    def op_alloc_async(self, size: int, stream: int) -> Trace:
        handle = self.on_stream(stream)
        trace = self.make("m", "cuMemAllocAsync", size, handle, size=size)
        if trace[0] == SUCCESS:
            self.call("cuMemsetD8Async", self.made["m"][-1], FILL, size, handle)
        self.after_work(stream)
        return trace

    def op_alloc_pool(self, size: int, pool: int, stream: int) -> Trace:
        handle = self.on_stream(stream)
        source = self.get("pool", pool)
        trace = self.make("m", "cuMemAllocFromPoolAsync", size, source, handle, size=size)
        if trace[0] == SUCCESS:
            self.call("cuMemsetD8Async", self.made["m"][-1], FILL, size, handle)
        self.after_work(stream)
        return trace

    def op_free_async(self, where: Trace, stream: int) -> Trace:
        handle = self.on_stream(stream)
        trace = [self.call("cuMemFreeAsync", self.address(where), handle)]
        self.after_work(stream)
        self.settle()
        return trace

    def op_pool_default(self, device: int) -> Trace:
        return self.make("pool", "cuDeviceGetDefaultMemPool", device)

    def op_pool_create(self, device: int) -> Trace:
        wanted = PoolProperties(type=1, location=Location(1, device))
        return self.make("pool", "cuMemPoolCreate", ctypes.byref(wanted))

    def op_pool_destroy(self, pool: int) -> Trace:
        self.settle()
        return [self.call("cuMemPoolDestroy", self.get("pool", pool))]

    def op_pool_current(self, device: int) -> Trace:
        code, handle = self.ask(U64, "cuDeviceGetMemPool", device)
        return [code, self.number("pool", handle)] if code == SUCCESS else [code]

    def op_pool_use(self, device: int, pool: int) -> Trace:
        return [self.call("cuDeviceSetMemPool", device, self.get("pool", pool))]

    def op_pool_get(self, pool: int, attribute: int) -> Trace:
        """How much is kept back is the driver's own affair."""
        value = U64(0)
        name = "cuMemPoolGetAttribute"
        code = self.call(name, self.get("pool", pool), attribute, ctypes.byref(value))
        return [code, value.value] if code == SUCCESS and attribute <= 4 else [code]

    def op_pool_set(self, pool: int, attribute: int, value: int) -> Trace:
        given = U64(value)
        name = "cuMemPoolSetAttribute"
        return [self.call(name, self.get("pool", pool), attribute, ctypes.byref(given))]

    def op_pool_trim(self, pool: int, keep: int) -> Trace:
        self.settle()
        return [self.call("cuMemPoolTrimTo", self.get("pool", pool), keep)]

    # -- virtual memory management

    def op_reserve(self, size: int, alignment: int) -> Trace:
        trace = self.make("v", "cuMemAddressReserve", size, alignment, 0, 0, size=size)
        if trace[0] == SUCCESS:
            unit = alignment or (2 << 20)
            trace.append(self.made["v"][-1] % unit)
        return trace

    def op_unreserve(self, where: Trace, size: int) -> Trace:
        return [self.call("cuMemAddressFree", self.address(where), size)]

    def op_create(self, size: int, device: int, handles: int) -> Trace:
        wanted = properties(device, handles)
        trace = self.make("handle", "cuMemCreate", size, ctypes.byref(wanted), 0, size=size)
        if trace[0] == SUCCESS:
            self.define(self.made["handle"][-1], size)
        return trace

    def define(self, handle: int, size: int) -> None:
        """Fill new memory through a mapping of its own, where there is a context to do it."""
        at = U64(0)
        access = Access(Location(1, 0), 3)
        if self.call("cuMemAddressReserve", ctypes.byref(at), size, 0, 0, 0) != SUCCESS:
            return
        if self.call("cuMemMap", at.value, size, 0, handle, 0) == SUCCESS:
            self.call("cuMemSetAccess", at.value, size, ctypes.byref(access), 1)
            self.call("cuMemsetD8_v2", at.value, FILL, size)
            self.settle()
            self.call("cuMemUnmap", at.value, size)
        self.call("cuMemAddressFree", at.value, size)

    def op_release(self, handle: int) -> Trace:
        return [self.call("cuMemRelease", self.get("handle", handle))]

    def op_map(self, where: Trace, size: int, offset: int, handle: int) -> Trace:
        given = self.get("handle", handle)
        return [self.call("cuMemMap", self.address(where), size, offset, given, 0)]

    def op_unmap(self, where: Trace, size: int) -> Trace:
        self.settle()
        return [self.call("cuMemUnmap", self.address(where), size)]

    def op_allow(self, where: Trace, size: int, device: int, flags: int) -> Trace:
        self.settle()
        access = Access(Location(1, device), flags)
        name = "cuMemSetAccess"
        return [self.call(name, self.address(where), size, ctypes.byref(access), 1)]

    def op_allowed(self, where: Trace, device: int) -> Trace:
        location = Location(1, device)
        name = "cuMemGetAccess"
        return self.answer(U64, name, ctypes.byref(location), self.address(where))

    def op_granularity(self, device: int, option: int) -> Trace:
        wanted = properties(device, 1)
        name = "cuMemGetAllocationGranularity"
        return self.answer(U64, name, ctypes.byref(wanted), option)

    def op_retain(self, where: Trace) -> Trace:
        """A handle that the program has already, with one more reference."""
        code, handle = self.ask(U64, "cuMemRetainAllocationHandle", self.address(where))
        return [code, self.number("handle", handle)] if code == SUCCESS else [code]

    def op_properties(self, handle: int) -> Trace:
        found = MemoryProperties()
        name = "cuMemGetAllocationPropertiesFromHandle"
        code = self.call(name, ctypes.byref(found), self.get("handle", handle))
        return [code, found.type, found.handles, found.location.id] if code == SUCCESS else [code]

    def op_export(self, handle: int) -> Trace:
        code, fd = self.ask(I32, "cuMemExportToShareableHandle", self.get("handle", handle), 1, 0)
        self.made["fd"].append(fd if code == SUCCESS else 0)
        return [code]

    def op_import(self, fd: int) -> Trace:
        """Import a descriptor that was exported, none (NULL) or something else (GARBAGE)."""
        if fd < 0:
            given = -1 if fd == -1 else os.memfd_create("stranger")
        else:
            given = self.get("fd", fd) or -1
        return self.make("handle", "cuMemImportFromShareableHandle", given, 1)

    def op_close(self, fd: int) -> Trace:
        if fd >= 0 and self.get("fd", fd):
            os.close(self.get("fd", fd))
            self.made["fd"][fd] = 0
        return [SUCCESS]
