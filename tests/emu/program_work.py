"""Operations on contexts, streams, events, host functions, modules and kernels. See program_lib."""

from __future__ import annotations

import ctypes

from tests.emu.program_lib import IMAGES, NOT_READY, NULL, SUCCESS, Objects, Trace

U64, U32, I32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
PENDING = "maybe"  # done or not: a matter of time


def settled(code: int) -> int | str:
    return PENDING if code in (SUCCESS, NOT_READY) else code


class WorkOperations(Objects):
    # -- the driver and contexts

    def op_init(self, flags: int) -> Trace:
        code = self.call("cuInit", flags)
        self.started = self.started or code == SUCCESS
        return [code]

    def op_device(self, ordinal: int) -> Trace:
        return self.answer(I32, "cuDeviceGet", ordinal)

    def op_retain_primary(self, device: int) -> Trace:
        return self.make("ctx", "cuDevicePrimaryCtxRetain", device)

    def op_release_primary(self, device: int) -> Trace:
        self.settle()
        return [self.call("cuDevicePrimaryCtxRelease_v2", device)]

    def op_reset_primary(self, device: int) -> Trace:
        self.settle()
        return [self.call("cuDevicePrimaryCtxReset_v2", device)]

    def op_primary_state(self, device: int) -> Trace:
        flags, active = U32(0), I32(0)
        name = "cuDevicePrimaryCtxGetState"
        code = self.call(name, device, ctypes.byref(flags), ctypes.byref(active))
        return [code, flags.value, active.value] if code == SUCCESS else [code]

    def op_context(self, flags: int, device: int) -> Trace:
        self.settle()
        return self.make("ctx", "cuCtxCreate_v2", flags, device)

    def op_end_context(self, context: int) -> Trace:
        self.settle()
        return [self.call("cuCtxDestroy_v2", self.get("ctx", context))]

    def op_use(self, context: int) -> Trace:
        self.settle()
        return [self.call("cuCtxSetCurrent", self.get("ctx", context))]

    def op_push(self, context: int) -> Trace:
        self.settle()
        return [self.call("cuCtxPushCurrent_v2", self.get("ctx", context))]

    def op_pop(self) -> Trace:
        self.settle()
        code, handle = self.ask(U64, "cuCtxPopCurrent_v2")
        return [code, self.number("ctx", handle)] if code == SUCCESS else [code]

    def op_current(self) -> Trace:
        code, handle = self.ask(U64, "cuCtxGetCurrent")
        return [code, self.number("ctx", handle)] if code == SUCCESS else [code]

    def op_current_device(self) -> Trace:
        return self.answer(I32, "cuCtxGetDevice")

    def op_synchronize(self) -> Trace:
        return [self.call("cuCtxSynchronize")]

    def op_context_flags(self) -> Trace:
        return self.answer(U32, "cuCtxGetFlags")

    def op_api_version(self, context: int) -> Trace:
        """What is answered depends on the header that a program was built with."""
        version = U32(0)
        return [self.call("cuCtxGetApiVersion", self.get("ctx", context), ctypes.byref(version))]

    def op_limit(self, key: int) -> Trace:
        """What a device gives by itself is its own affair."""
        code, _ = self.ask(U64, "cuCtxGetLimit", key)
        return [code]

    def op_set_limit(self, key: int, value: int) -> Trace:
        return [self.call("cuCtxSetLimit", key, value)]

    # -- streams

    def op_stream(self, flags: int, priority: int) -> Trace:
        self.streams_of.append(self.current())
        return self.make("stream", "cuStreamCreateWithPriority", flags, priority)

    def op_end_stream(self, stream: int) -> Trace:
        self.settle()
        trace = [self.call("cuStreamDestroy_v2", self.get("stream", stream))]
        if trace[0] == SUCCESS:
            self.ended.add(stream)
        return trace

    def op_wait_stream(self, stream: int) -> Trace:
        return [self.call("cuStreamSynchronize", self.get("stream", stream))]

    def op_query_stream(self, stream: int) -> Trace:
        return [settled(self.call("cuStreamQuery", self.get("stream", stream)))]

    def op_stream_info(self, what: str, stream: int) -> Trace:
        given, out = self.get("stream", stream), U64(0)
        code = self.call(f"cuStreamGet{what}", given, ctypes.byref(out))
        if code != SUCCESS:
            return [code]
        if what == "Ctx":
            return [code, self.number("ctx", out.value)]
        return [code, I32(out.value).value]

    def op_capturing(self, stream: int) -> Trace:
        status = I32(7)
        name = "cuStreamIsCapturing"
        code = self.call(name, self.get("stream", stream), ctypes.byref(status))
        return [code, status.value] if code == SUCCESS else [code]

    # -- events

    def op_event(self, flags: int) -> Trace:
        return self.make("event", "cuEventCreate", flags)

    def op_end_event(self, event: int) -> Trace:
        self.settle()
        return [self.call("cuEventDestroy_v2", self.get("event", event))]

    def op_record(self, event: int, stream: int) -> Trace:
        handle = self.on_stream(stream)
        trace = [self.call("cuEventRecord", self.get("event", event), handle)]
        self.after_work(stream)
        return trace

    def op_follow(self, stream: int, event: int) -> Trace:
        """Work of the stream comes after the event, so nothing has to settle before it."""
        given = self.get("stream", stream)
        trace = [self.call("cuStreamWaitEvent", given, self.get("event", event), 0)]
        if trace[0] == SUCCESS:
            self.last_stream = stream
        self.after_work(stream)
        return trace

    def op_wait_event(self, event: int) -> Trace:
        return [self.call("cuEventSynchronize", self.get("event", event))]

    def op_query_event(self, event: int) -> Trace:
        return [settled(self.call("cuEventQuery", self.get("event", event)))]

    def op_elapsed(self, start: int, end: int) -> Trace:
        self.settle()
        out = ctypes.c_float(-1)
        begin, finish = self.get("event", start), self.get("event", end)
        code = self.call("cuEventElapsedTime", ctypes.byref(out), begin, finish)
        return [code, abs(out.value) < 60_000] if code == SUCCESS else [code]

    # -- host functions

    def op_host_function(self, stream: int, number: int) -> Trace:
        body = self.keep(HOST_FUNCTION(lambda given: self.calls.append(int(given or 0))))
        trace = [self.call("cuLaunchHostFunc", self.on_stream(stream), body, number)]
        self.after_work(stream)
        return trace

    def op_callback(self, stream: int, number: int, flags: int) -> Trace:
        body = CALLBACK(lambda _, code, given: self.calls.extend((int(given or 0), int(code))))
        name = "cuStreamAddCallback"
        trace = [self.call(name, self.on_stream(stream), self.keep(body), number, flags)]
        self.after_work(stream)
        return trace

    def op_no_function(self, stream: int) -> Trace:
        return [self.call("cuLaunchHostFunc", self.get("stream", stream), 0, 0)]

    def op_called(self) -> Trace:
        """What host functions were given, in the order in which they ran."""
        self.settle()
        return [SUCCESS, *self.calls]

    # -- modules

    def op_module(self, image: str) -> Trace:
        return self.make("module", "cuModuleLoadData", self.image(image))

    def op_no_image(self) -> Trace:
        return self.make("module", "cuModuleLoadData", 0)

    def image(self, name: str) -> ctypes.Array[ctypes.c_char]:
        data = IMAGES[name]
        buffer: ctypes.Array[ctypes.c_char] = self.keep(
            ctypes.create_string_buffer(data, len(data) + 8)
        )
        return buffer

    def op_unload(self, module: int) -> Trace:
        self.settle()
        return [self.call("cuModuleUnload", self.get("module", module))]

    def op_function(self, module: int, name: str) -> Trace:
        text = name.encode()
        return self.make("function", "cuModuleGetFunction", self.get("module", module), text)

    def op_global(self, module: int, name: str) -> Trace:
        return self.variable("cuModuleGetGlobal_v2", self.get("module", module), name)

    def op_library_global(self, library: int, name: str) -> Trace:
        return self.variable("cuLibraryGetGlobal", self.get("library", library), name)

    def variable(self, call: str, given: int, name: str) -> Trace:
        size = U64(0)
        trace = self.make("g", call, ctypes.byref(size), given, name.encode())
        self.sizes["g"][-1] = size.value
        return [*trace, size.value] if trace[0] == SUCCESS else trace

    def op_library(self, image: str) -> Trace:
        name = "cuLibraryLoadData"
        return self.make("library", name, self.image(image), 0, 0, 0, 0, 0, 0)

    def op_end_library(self, library: int) -> Trace:
        self.settle()
        return [self.call("cuLibraryUnload", self.get("library", library))]

    def op_kernel(self, library: int, name: str) -> Trace:
        """A kernel can be launched as it is, so it is counted as a function."""
        given = self.get("library", library)
        return self.make("function", "cuLibraryGetKernel", given, name.encode())

    def op_kernel_count(self, library: int) -> Trace:
        return self.answer(U32, "cuLibraryGetKernelCount", self.get("library", library))

    # -- kernels

    def op_function_attribute(self, key: int, function: int) -> Trace:
        """How many registers and how much local memory: a compiler's own affair."""
        trace = self.answer(I32, "cuFuncGetAttribute", key, self.get("function", function))
        return trace if key in (0, 1, 8) else trace[:1]

    def op_set_function(self, function: int, key: int, value: int) -> Trace:
        return [self.call("cuFuncSetAttribute", self.get("function", function), key, value)]

    def op_function_name(self, function: int) -> Trace:
        text = ctypes.c_char_p()
        name = "cuFuncGetName"
        code = self.call(name, ctypes.byref(text), self.get("function", function))
        return [code, (text.value or b"").decode()] if code == SUCCESS else [code]

    def op_parameter(self, function: int, index: int) -> Trace:
        offset, size = U64(0), U64(0)
        given = self.get("function", function)
        name = "cuFuncGetParamInfo"
        code = self.call(name, given, index, ctypes.byref(offset), ctypes.byref(size))
        return [code, offset.value, size.value] if code == SUCCESS else [code]

    def op_occupancy(self, function: int, block: int, shared: int) -> Trace:
        """How many is the device's own affair."""
        given = self.get("function", function)
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return self.answer(I32, name, given, block, shared)[:1]

    def op_launch(
        self,
        function: int,
        shape: list[int],
        shared: int,
        stream: int,
        where: Trace | None,
        count: int,
    ) -> Trace:
        """`shape` is of grid and block; the work is done, well or not, when this is."""
        pointer, number = U64(self.address(where or ["n", NULL, 0])), U32(count)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(number))
        self.settle()
        given, handle = self.get("function", function), self.get("stream", stream)
        parameters = values if where else 0
        code = self.call("cuLaunchKernel", given, *shape, shared, handle, parameters, 0)
        if code != SUCCESS:
            return [code]
        self.after_work(stream)
        return [code, self.call("cuCtxSynchronize")]

    def op_start(self, function: int, stream: int, where: Trace, count: int) -> Trace:
        """A launch that nothing is wrong with, and that nobody waits for."""
        pointer, number = U64(self.address(where)), U32(count)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(number))
        given, handle = self.get("function", function), self.on_stream(stream)
        grid = (count + 63) // 64 or 1
        code = self.call("cuLaunchKernel", given, grid, 1, 1, 64, 1, 1, 0, handle, values, 0)
        self.after_work(stream)
        return [code]
