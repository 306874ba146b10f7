"""What the replay engine refuses by name, besides graphs: once it was used, or while it lives."""

from __future__ import annotations

from dataclasses import dataclass

from tests.emu.replay_cases_arrays import HELPERS as ARRAYS

# What the engine refuses once it was used with success, as far as the emulated driver has it.
REFUSED = {
    "cuDeviceSetMemPool": """
ok(cu.cuDeviceSetMemPool(device, ok(cu.cuDeviceGetDefaultMemPool(device))))
""",
}


@dataclass(frozen=True)
class Living:
    """What is refused by a name while it lives."""

    name: str
    make: str
    end: str
    gpu_only: bool = False


# With an option by which FlowGPU cannot tell what code the driver makes: it stays there.
MANAGED = """
code = PTX.rstrip(bytes(1)) + b".visible .global .attribute(.managed) .b8 m[68];" + bytes(1)
unknown = cu.CUjit_option.CU_JIT_MIN_CTA_PER_SM
"""

LIVING = (
    Living(
        "managed variables of a module",
        f"{MANAGED}module = ok(cu.cuModuleLoadDataEx(code, 1, [unknown], [1]))",
        "ok(cu.cuModuleUnload(module))",
    ),
    Living(
        "memory from cuMemCreate that is not plain device memory",
        """
wanted = cu.CUmemAllocationProp()
wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
wanted.allocFlags.compressionType = 1
handle = ok(cu.cuMemCreate(2 * MIB, wanted, 0))
""",
        "ok(cu.cuMemRelease(handle))",
    ),
    Living(
        "a context with attributes of a thread's default stream (cuStreamSetAttribute)",
        """
mine = ok(cu.cuCtxCreate(None, 0, device))
policy = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
value = cu.CUstreamAttrValue()
value.syncPolicy = cu.CUsynchronizationPolicy.CU_SYNC_POLICY_SPIN
ok(cu.cuStreamSetAttribute(cu.CUstream(2), policy, value))
""",
        "ok(cu.cuCtxDestroy(mine))",
    ),
    Living(
        "cuLinkCreate_v2",
        "state = ok(cu.cuLinkCreate(0, [], []))",
        "ok(cu.cuLinkDestroy(state))",
    ),
    Living(
        "a CUDA array to which memory is mapped (sparse, or deferred)",
        f"""{ARRAYS}
later = ok(cu.cuArray3DCreate(described(256, 256, 0, 0x80)))
""",
        "ok(cu.cuArrayDestroy(later))",
        gpu_only=True,
    ),
    Living(
        "a texture object of an array that has ended",
        f"""{ARRAYS}
array = ok(cu.cuArray3DCreate(described(16, 4)))
seen = texture(of_array(array))
ok(cu.cuArrayDestroy(array))
""",
        "ok(cu.cuTexObjectDestroy(seen))",
    ),
    Living(
        "a graph executable that the device may launch",
        """
from tests.emu.driver_cases_graphs import add_kernel, inc_params, run, zeros
where, graph, data = ok(cu.cuStreamCreate(1)), ok(cu.cuGraphCreate(0)), zeros(8)
add_kernel(graph, [], inc_params(function(b"inc"), data, 8))
launch = int(cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
plain, for_device = (ok(cu.cuGraphInstantiate(graph, flags)) for flags in (0, launch))
found = [int(ok(cu.cuGraphExecGetFlags(one))) & launch for one in (plain, for_device)]
assert found == [0, launch], found
ok(cu.cuGraphUpload(for_device, where))
for one in (for_device, plain, for_device):
    run(one, where)
assert [int(word) for word in download(data, 8)] == [3] * 8
# What a kernel is given must be the driver's: these are the engine's own handles.
ours = range(0x1F0000000000, 0x1F0000000000 + (64 << 20))
assert int(plain) in ours and int(for_device) not in ours
""",
        "ok(cu.cuGraphExecDestroy(for_device)); ok(cu.cuGraphExecDestroy(plain))",
    ),
)
