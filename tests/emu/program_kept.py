"""Programs that are kept: some found something, some ask what drawn ones seldom come to."""

from __future__ import annotations

from typing import Any

START: list[list[Any]] = [["init", 0], ["retain_primary", 0], ["use", 0]]

KEPT: dict[str, list[list[Any]]] = {
    "the device died of a copy of 1 TiB from host to host": [
        *START,
        ["unified", ["n", -1, 0], ["b", 0, 0], 1 << 40, None],
        ["synchronize"],
    ],
    "memory made under a context that had ended kept every checkpoint from being taken": [
        *START,
        ["reset_primary", 0],
        ["create", 2 << 20, 0, 1],
        ["checkpoint"],
    ],
}

FAULT: list[list[Any]] = [
    ["module", "good"],
    ["function", 0, "inc"],
    ["launch", 0, [1, 1, 1, 1, 1, 1], 0, -1, ["n", -1, 0x10000], 1],
]
MAPPED: list[list[Any]] = [
    ["reserve", 4 << 20, 0],
    ["create", 2 << 20, 0, 1],
    ["map", ["v", 0, 0], 2 << 20, 0, 0],
    ["allow", ["v", 0, 0], 2 << 20, 0, 3],
]
M, V, H = ["m", 0, 0], ["v", 0, 0], ["h", 0, 0]
QUERIES: list[list[Any]] = [
    ["range", M],
    ["attribute", "type", M],
    ["attributes", M],
    ["info"],
    ["current"],
    ["current_device"],
    ["context_flags"],
    ["limit", 0],
    ["limit", 99],
    ["synchronize"],
    ["query_stream", -1],
    ["stream_info", "Flags", -1],
    ["alloc", 0],
    ["alloc", 100],
    ["free", ["m", 0, 4]],
    ["host_alloc", 0, 0],
    ["host_flags", H],
    ["event", 0],
    ["record", 0, -1],
    ["function_name", 0],
    ["function_attribute", 0, 0],
    ["parameter", 0, 0],
    ["primary_state", 0],
    ["pool_current", 0],
    ["granularity", 0, 0],
    ["reserve", 2 << 20, 0],
    ["create", 2 << 20, 0, 1],
    ["free", M],
]
HOST_ATTRIBUTES = (
    "type",
    "device",
    "host",
    "ordinal",
    "context",
    "mapped",
    "size",
    "start",
    "managed",
)
IMAGES_ASKED = ("register", "symbol", "cut", "target", "future", "headless", "bare", "empty")

# What drawn programs seldom come to; each ends before what may crash a driver.
ASKED: list[list[list[Any]]] = [
    [*START, ["alloc", 100], *FAULT, *QUERIES],
    [*START, ["alloc", 100], *FAULT[:2], ["reset_primary", 0], *QUERIES],
    [*START, ["alloc", 100], *FAULT[:2], ["pop"], *QUERIES],
    [["init", 1], *QUERIES],
    *([*START, ["module", image]] for image in IMAGES_ASKED),
    *(
        [*START, ["library", image], ["kernel_count", 0], ["kernel", 0, "k"], ["kernel", 0, "inc"]]
        for image in ("opcode", "text", "version", "target", "empty", "machine")
    ),
    [*START, *MAPPED, ["release", 0], ["properties", 0], ["retain", V], ["properties", 0]],
    [*START, *MAPPED, ["release", 0], ["export", 0]],
    [*START, *MAPPED, ["release", 0], ["map", ["v", 0, 2 << 20], 2 << 20, 0, 0]],
    [*START, *MAPPED, ["release", 0], ["unmap", V, 2 << 20], ["properties", 0]],
    [*START, *MAPPED, ["unmap", ["v", 0, 2 << 20], 2 << 20], ["unmap", V, 4 << 20]],
    [*START, *MAPPED, ["unmap", V, 4096], ["unmap", ["v", 0, 4096], 4096], ["unmap", V, 0]],
    [*START, *MAPPED, ["unreserve", V, 4 << 20], ["unreserve", V, 2 << 20], ["retain", V]],
    [*START, *MAPPED, ["allow", V, 4 << 20, 0, 3], ["allow", V, 4096, 0, 3], ["allow", V, 0, 0, 3]],
    [*START, *MAPPED, ["allow", V, 2 << 20, 0, 2], ["allow", V, 2 << 20, 99, 3]],
    [*START, *MAPPED, ["allow", V, 2 << 20, 0, 1], ["set", 32, V, 1, 1, None], ["read", V, 4]],
    [*START, *MAPPED, ["allow", V, 2 << 20, 0, 0], ["read", V, 4], ["allowed", V, 0]],
    [*START, *MAPPED, ["free", V], ["free_async", V, -1], ["range", ["v", 0, 4096]], ["range", V]],
    [*START, *MAPPED, ["range", ["v", 0, 2 << 20]], ["attribute", "type", ["v", 0, 2 << 20]]],
    [*START, *MAPPED, *(["attribute", name, ["v", 0, 16]] for name in HOST_ATTRIBUTES)],
    [*START, ["host_alloc", 4096, 0], *(["attribute", n, ["h", 0, 8]] for n in HOST_ATTRIBUTES)],
    [*START, ["host_register", 4096, 64, 0], *(["attribute", n, H] for n in HOST_ATTRIBUTES)],
    [*START, ["host_alloc", 4096, 0], ["attributes", H], ["range", H], ["free", H]],
    [*START, ["host_alloc", 4096, 0], ["host_unregister", H], ["host_register_again", H, 4096]],
    [*START, ["host_register", 4096, 0, 0], ["host_free", H], ["host_unregister", ["h", 0, 8]]],
    [*START, ["host_alloc", 4096, 0], ["set", 8, H, 7, 64, None], ["read", H, 64]],
    [*START, ["alloc", 64], ["host_alloc", 4096, 0], ["d2d", H, M, 64, None], ["read", H, 64]],
    [*START, ["alloc", 64], ["h2d", ["n", -1, 0], ["b", 0, 0], 0, None], ["free_async", M, -1]],
    [
        *START,
        ["alloc", 64],
        ["set", 32, ["m", 0, 2], 1, 1, None],
        ["set", 16, ["m", 0, 1], 1, 1, None],
    ],
    [*START, ["alloc", 64], ["h2d", M, ["m", 0, 0], 8, None], ["d2h", ["m", 0, 8], M, 8, None]],
    [*START, ["alloc", 100], ["free_async", ["m", 0, 4], -1], ["free_async", M, -1], ["free", M]],
    [*START, ["alloc_async", 100, -1], ["free", ["m", 0, 4]], ["free", M], ["free_async", M, -1]],
    [*START, ["alloc_async", 100, -1], ["range", M], ["attribute", "pool", M], ["attributes", M]],
    [*START, ["pool_default", 99], ["pool_use", 99, 0], ["pool_use", 0, -1], ["pool_trim", -1, 0]],
    [*START, ["library", "good"], ["kernel", 0, "inc"], ["parameter", 0, 0], ["parameter", 0, 9]],
    [
        *START,
        ["library", "good"],
        ["kernel", 0, "inc"],
        ["function_name", 0],
        ["occupancy", 0, 64, 0],
    ],
    [*START, ["library", "good"], ["kernel", 0, "inc"], ["function_attribute", 0, 0]],
    [*START, ["library", "good"], ["kernel", 0, "inc"], ["set_function", 0, 8, 1024]],
    [*START, ["function_attribute", 0, -1], ["occupancy", -1, 64, 0], ["set_function", -1, 8, 0]],
    [*START, ["launch", -1, [1, 1, 1, 1, 1, 1], 0, -1, M, 1], ["unload", -1], ["end_library", -1]],
    [*START, ["end_stream", -1], ["end_stream", -3], ["end_event", -1], ["follow", -1, -1]],
    [*START, ["release_primary", 0], ["release_primary", 0], ["reset_primary", 0], ["current"]],
    [
        *START,
        ["reset_primary", 0],
        ["primary_state", 0],
        ["release_primary", 0],
        ["release_primary", 0],
    ],
    [
        *START,
        ["reset_primary", 0],
        ["retain_primary", 0],
        ["current"],
        ["alloc", 4],
        ["synchronize"],
    ],
    [*START, ["context", 0, 0], ["end_context", 1], ["current"], ["current_device"], ["pop"]],
    [*START, ["context", 0, 0], ["use", 0], ["end_context", 1], ["use", 1], ["current"]],
    [*START, ["context", 0, 0], ["pop"], ["end_context", 1], ["push", 1], ["api_version", 1]],
    [
        *START,
        ["context", 0, 0],
        ["push", 1],
        ["end_context", 1],
        ["current"],
        ["alloc", 4],
        ["pop"],
    ],
    [*START, ["alloc", 64], ["context", 0, 0], ["read", M, 64], ["free", M], ["attributes", M]],
    [
        *START,
        ["event", 0],
        ["context", 0, 0],
        ["record", 0, -1],
        ["stream", 0, 0],
        ["follow", 0, 0],
    ],
    [
        *START,
        *FAULT[:2],
        ["context", 0, 0],
        ["launch", 0, [1, 1, 1, 1, 1, 1], 0, -1, ["n", -1, 0], 0],
    ],
    [
        *START,
        *FAULT,
        ["end_context", 0],
        ["release_primary", 0],
        ["retain_primary", 0],
        ["alloc", 4],
    ],
    [*START, *FAULT, ["reset_primary", 0], ["retain_primary", 0], ["use", 0], ["alloc", 4]],
    [*START, ["context", 0, 0], *FAULT, ["use", 0], ["alloc", 4], ["use", 1], ["end_context", 1]],
    [*START, ["stream", 0, 0], *FAULT, ["end_stream", 0], ["unload", 0], ["host_alloc", 64, 0]],
    [
        *START,
        ["create", 2 << 20, 0, 1],
        ["export", 0],
        ["import", 0],
        ["export", 1],
        ["release", 0],
    ],
    [*START, ["import", -2], ["create", 2 << 20, 99, 1], ["granularity", 99, 0], ["allowed", V, 0]],
]
