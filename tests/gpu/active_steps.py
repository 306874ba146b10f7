"""What PyTorch's allocator does in real programs, stop by stop, for test_active_memory.py.

At each stop one line of JSON says what the allocator has given out; a line on stdin lets the
program go on. Results are checked on the way, as its memory leaves the process at each stop.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch

MIB = 1 << 20
DRIVER = ctypes.CDLL("libcuda.so.1")


def segments() -> list[dict[str, Any]]:
    """Segments of the allocator with the (address, bytes) of the blocks that it has given out."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        at, blocks = segment["address"], []
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks.append([at, block["size"]])
            at += block["size"]
        found.append(
            {
                "address": segment["address"],
                "bytes": segment["total_size"],
                "private": tuple(segment["segment_pool_id"]) != (0, 0),
                "blocks": blocks,
            }
        )
    return found


def stop(name: str) -> None:
    """Report, and wait until the test has looked."""
    print(json.dumps({"stop": name, "segments": segments()}), flush=True)
    assert sys.stdin.readline(), "nobody waits any more"


def training(device: str) -> None:
    """Steps of a small model: weights, state of the optimizer, activations in the middle."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(4):
        x = torch.randn(256 + 64 * step, 512, device=device)
        loss = ((model(x) - x) ** 2).mean()
        stop(f"{device}: forward of step {step}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss).item()
        del x, loss
        stop(f"{device}: end of step {step}")


def empty_cache() -> None:
    """Memory that the allocator has given back, and that somebody else has got."""
    kept = torch.arange(MIB, device="cuda")
    big = torch.ones(64 * MIB, device="cuda")
    stop("a big tensor")
    del big
    stop("its memory is cached")
    torch.cuda.empty_cache()
    stop("its memory is given back")
    address = ctypes.c_uint64()
    assert DRIVER.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(256 * MIB)) == 0
    stop("its memory is a stranger's")
    assert DRIVER.cuMemFree_v2(address) == 0
    assert int(kept.sum()) == MIB * (MIB - 1) // 2


def graph() -> None:
    """A captured graph computes in memory that the allocator has taken back."""
    x = torch.zeros(MIB, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x * 2 + 1).sum().item()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        inner = x * 2
        y = inner + 1
        del inner
    x.fill_(5)
    captured.replay()
    torch.cuda.synchronize()
    stop("a graph is captured")
    assert bool((y == 11).all())
    x.fill_(6)
    captured.replay()
    assert bool((y == 13).all())
    del y, captured
    torch.cuda.empty_cache()
    stop("the graph is gone")


def record_stream() -> None:
    """A block that another stream may still use when its tensor is gone."""
    side = torch.cuda.Stream()
    x = torch.full((8 * MIB,), 2.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(50):
            total = x.sum()
    x.record_stream(side)
    del x
    stop("a tensor is gone that a stream may use")
    side.synchronize()
    assert total.item() == 16 * MIB
    stop("the stream is done with it")


def main() -> None:
    for device in range(torch.cuda.device_count()):
        training(f"cuda:{device}")
    for scene in (empty_cache, graph, record_stream):
        torch.cuda.empty_cache()
        scene()
    print(json.dumps({"stop": "end", "segments": segments()}), flush=True)


if __name__ == "__main__":
    main()
