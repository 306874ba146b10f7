"""The driver calls of the ghost, through cuda-bindings: memory, contexts and the checkpoint API.

`Driver` is what the ghost needs; `CudaDriver` is the real (or emulated) one. Handles and addresses
are integers. Every failure raises DriverError with the call and the driver's own error name.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator import faults
from coordinator.engine import CheckpointApi, ProcessState
from flowgpu.wire import Fault

PCI_BYTES = 32
"""Room for a bus id."""


class DriverError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, name: str) -> None:
        self.call = call
        self.name = name
        super().__init__(f"{call}: {name}")


@dataclass(frozen=True)
class Gpu:
    """One device as the driver shows it to the ghost."""

    ordinal: int
    uuid: str
    name: str
    memory: int
    capability: str
    peers: tuple[dict[str, int], ...]
    """How the device reaches the memory of each other one, by ordinal: `access`, `atomics` (1: yes)
    and the `rank` of the link's speed; nothing for itself."""
    pci: str = ""
    """Its bus id, as in /sys/bus/pci/devices."""


class Driver(Protocol):
    """The driver as the ghost uses it."""

    version: int
    checkpoints: CheckpointApi | None
    library: str

    def gpus(self) -> list[Gpu]: ...

    def context(self, ordinal: int) -> int:
        """The device's primary context, made at the first call."""

    def use(self, ordinal: int) -> None:
        """Make the device's context current in this thread."""

    def free(self, ordinal: int) -> int:
        """Bytes of the device that nobody has."""

    def granularity(self, ordinal: int) -> int: ...

    def import_block(self, fd: int) -> tuple[int, int]:
        """Import an exported allocation and give (handle, ordinal of its device).

        The fd stays the caller's.
        """

    def create_block(self, ordinal: int, size: int) -> tuple[int, int]:
        """Allocate exportable device memory and give (handle, fd)."""

    def reserve(self, size: int) -> int: ...

    def map(self, address: int, size: int, handle: int) -> None: ...

    def allow(self, ordinal: int, address: int, size: int) -> None:
        """Let the device read and write a mapped range."""

    def unmap(self, address: int, size: int) -> None: ...

    def release(self, handle: int) -> None: ...


def check_context() -> None:
    """Raise what making a context meets where a fault is to fire. Not of those made in advance."""
    if faults.fires(Fault.GHOST_CONTEXT):
        raise DriverError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_UNKNOWN")
    if faults.fires(Fault.GHOST_ROOM):
        raise DriverError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY")


class CudaDriver:
    """cuda-bindings on the libcuda.so.1 that the loader finds."""

    def __init__(self) -> None:
        # Imported here: the tests of this package run where no libcuda.so.1 is.
        from cuda.bindings import driver

        self._cu = driver
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)
        self.version = int(self._call("cuDriverGetVersion"))
        self.library = loaded_libcuda()
        self.checkpoints: CheckpointApi | None = (
            CudaCheckpoints(self) if self.version >= CHECKPOINT_API_VERSION else None
        )

    def _call(self, name: str, *arguments: object) -> Any:
        error, *values = getattr(self._cu, name)(*arguments)
        if error != self._cu.CUresult.CUDA_SUCCESS:
            raise DriverError(name, error.name)
        return values[0] if len(values) == 1 else values

    def gpus(self) -> list[Gpu]:
        """Every device that this process sees."""
        attribute = self._cu.CUdevice_attribute
        found = []
        count = self._call("cuDeviceGetCount")
        for ordinal in range(count):
            device = self._call("cuDeviceGet", ordinal)
            name = self._call("cuDeviceGetName", 256, device)
            major, minor = (
                self._call("cuDeviceGetAttribute", key, device)
                for key in (
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                )
            )
            found.append(
                Gpu(
                    ordinal=ordinal,
                    uuid=uuid_text(
                        bytes(self._call("cuDeviceGetUuid", device).bytes), text_of(name)
                    ),
                    name=text_of(name),
                    memory=int(self._call("cuDeviceTotalMem", device)),
                    capability=f"{major}.{minor}",
                    peers=tuple(self._peer(device, other) for other in range(count)),
                    pci=text_of(self._call("cuDeviceGetPCIBusId", PCI_BYTES, device)),
                )
            )
        return found

    def _peer(self, device: int, other: int) -> dict[str, int]:
        attribute = self._cu.CUdevice_P2PAttribute
        keys = {
            "access": attribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
            "atomics": attribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            "rank": attribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
        }
        if int(device) == other:
            return {}
        return {
            name: int(self._call("cuDeviceGetP2PAttribute", key, device, other))
            for name, key in keys.items()
        }

    def context(self, ordinal: int) -> int:
        """See Driver.context."""
        with self._lock:
            if ordinal not in self._contexts:
                check_context()
                device = self._call("cuDeviceGet", ordinal)
                self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", device)
            return int(self._contexts[ordinal])

    def use(self, ordinal: int) -> None:
        """See Driver.use."""
        self.context(ordinal)
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def free(self, ordinal: int) -> int:
        """See Driver.free."""
        self.use(ordinal)
        return int(self._call("cuMemGetInfo")[0])

    def _property(self, ordinal: int) -> Any:
        cu = self._cu
        wanted = cu.CUmemAllocationProp()
        wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = ordinal
        wanted.requestedHandleTypes = FD_HANDLE(cu)
        rdma = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        wanted.allocFlags.gpuDirectRDMACapable = self._call("cuDeviceGetAttribute", rdma, ordinal)
        return wanted

    def granularity(self, ordinal: int) -> int:
        """See Driver.granularity."""
        minimum = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._property(ordinal), minimum))

    def import_block(self, fd: int) -> tuple[int, int]:
        """See Driver.import_block."""
        call = "cuMemImportFromShareableHandle"
        handle = self._call(call, fd, FD_HANDLE(self._cu))
        found = self._call("cuMemGetAllocationPropertiesFromHandle", handle)
        ordinal = int(found.location.id)
        # A job may see devices that the process which started FlowGPU did not: the driver imports
        # their memory, and gives a number that is no device's.
        if not 0 <= ordinal < self._call("cuDeviceGetCount"):
            self.release(int(handle))
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            where = f"a device outside FlowGPU's own CUDA_VISIBLE_DEVICES={visible}"
            raise DriverError(call, f"memory on {where}")
        return int(handle), ordinal

    def create_block(self, ordinal: int, size: int) -> tuple[int, int]:
        """See Driver.create_block."""
        handle = self._call("cuMemCreate", size, self._property(ordinal), 0)
        fd = self._call("cuMemExportToShareableHandle", handle, FD_HANDLE(self._cu), 0)
        return int(handle), int(fd)

    def reserve(self, size: int) -> int:
        """See Driver.reserve."""
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def map(self, address: int, size: int, handle: int) -> None:
        """See Driver.map."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, ordinal: int, address: int, size: int) -> None:
        """See Driver.allow."""
        access = self._cu.CUmemAccessDesc()
        access.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)

    def unmap(self, address: int, size: int) -> None:
        """See Driver.unmap."""
        self._call("cuMemUnmap", address, size)

    def release(self, handle: int) -> None:
        """See Driver.release."""
        self._call("cuMemRelease", handle)


CHECKPOINT_API_VERSION = 12080
"""cuDriverGetVersion of r570, the first driver with cuCheckpointProcess*."""


def FD_HANDLE(cu: Any) -> Any:
    """CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR of the bindings module."""
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def text_of(raw: bytes) -> str:
    """What the driver has written to a buffer."""
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def uuid_text(raw: bytes, name: str) -> str:
    """A device's UUID as NVIDIA's tools print it, and CUDA_VISIBLE_DEVICES takes it."""
    return f"{'MIG' if ' MIG ' in name else 'GPU'}-{uuid.UUID(bytes=raw)}"


def loaded_libcuda() -> str:
    """Path of the libcuda.so.1 that is mapped into this process."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if "libcuda.so" in path[2]:
                return path[1] + path[2]
    raise DriverError("dlopen", "libcuda.so.1 is not loaded")


KERNEL_GPUS = Path("/proc/driver/nvidia/gpus")


class CudaCheckpoints:
    """The driver's checkpoint API."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._cu = driver._cu
        self._call = driver._call

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Let in-flight work of the process end and block its driver calls."""
        arguments = self._cu.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """Move the locked process's device state into its own memory and close its devices."""
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        """Bring device state back; `gpus` maps old to new UUIDs, empty where nothing changed."""
        arguments = None
        if gpus:
            arguments = self._cu.CUcheckpointRestoreArgs()
            arguments.gpuPairs = [self._pair(old, new) for old, new in gpus.items()]
            arguments.gpuPairsCount = len(gpus)
        self._call("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> None:
        """Let the process call the driver again."""
        self._call("cuCheckpointProcessUnlock", pid, None)

    def restore_thread(self, pid: int) -> int:
        """The thread of the process in which the driver restores it."""
        return int(self._call("cuCheckpointProcessGetRestoreThreadId", pid))

    def state(self, pid: int) -> ProcessState:
        """What the driver says of the process."""
        return ProcessState(int(self._call("cuCheckpointProcessGetState", pid)))

    def machine_gpus(self) -> list[str]:
        """See CheckpointApi.machine_gpus; the kernel's driver tells of those not seen here."""
        told = "\n".join(path.read_text() for path in KERNEL_GPUS.glob("*/information"))
        found = re.findall(r"^GPU UUID:\s*(GPU-\S+)$", told, re.MULTILINE)
        return sorted({*found, *(gpu.uuid for gpu in self._driver.gpus())})

    def _pair(self, old: str, new: str) -> Any:
        pair = self._cu.CUcheckpointGpuPair()
        for text, side in ((old, "oldUuid"), (new, "newUuid")):
            # The bindings give no way to fill a CUuuid but to lay one over existing bytes.
            raw = array("B", uuid.UUID(text.removeprefix("GPU-")).bytes)
            setattr(pair, side, self._cu.CUuuid(_ptr=raw.buffer_info()[0]))
        return pair
