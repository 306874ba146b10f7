"""Time the steps of a job whose cost is launching kernels, to see what FlowGPU adds to each call.

    python -m bench.step_time --job gpt2|launches --steps N

`gpt2` trains GPT-2 (12 layers) on batches of 2 x 128 tokens: launch bound. `launches` runs empty
kernels back to back. Prints one JSON object with the seconds of each step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

LAUNCHES_A_STEP = 2000
BATCH, LENGTH = 2, 128

EMPTY = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry empty()
{
    ret;
}
\0"""


def launches() -> Callable[[], None]:
    """A step of empty kernels, waited for at its end."""
    from cuda.bindings import driver

    from bench.device import check, context

    context()
    module = check(driver.cuModuleLoadData(EMPTY))
    kernel = check(driver.cuModuleGetFunction(module, b"empty"))

    def step() -> None:
        for _ in range(LAUNCHES_A_STEP):
            driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        check(driver.cuCtxSynchronize())

    return step


def gpt2() -> Callable[[], None]:
    """A training step, waited for by reading the loss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (BATCH, LENGTH), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.step_time")
    parser.add_argument("--job", choices=("gpt2", "launches"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    step = {"gpt2": gpt2, "launches": launches}[options.job]()
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
