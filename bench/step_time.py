"""Time steps of a job in blocks, each when it is asked for (bench/overhead.py).

    python -m bench.step_time --job gpt2 --name NAME --control SOCKET [--small]

`gpt2` trains GPT-2 (12 layers) on batches of 2 x 128 tokens: launch bound. `gpt2_short` has two of
the layers, and so as many launches in a second: the shorter two steps are that take turns, the more
alike is the machine to both. `gpt2_xl` trains GPT-2 XL (48 layers) on batches of 8 x 512, as
workloads/gpt2_xl.py does. `resnet50` trains ResNet-50 on 32 images of 224 x 224. `launches` runs
empty kernels back to back. After its warm-up the program connects to SOCKET and says its name; from
then on each line there asks for that many steps and is answered with one JSON object. Where it says
`switched`, as many are made in each of the ways of bench/switch.py, which take turns, and there is
an object of each way; where it says `counted`, it is answered how often they called what. It ends
when the connection does. Its first thread stays on the first processor, the others on the third and
fourth, so that no process has better ones than another, and none that may be the other half of a
core.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.switch import MODES, ON, Switch, counts

LAUNCHES_A_STEP, FEW_LAUNCHES = 2000, 50
WARM_UP, XL_WARM_UP = 20, 5
BATCH, LENGTH = 2, 128
XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
XL_BATCH, XL_LENGTH = 8, 512
IMAGES, SIDE, CLASSES = 32, 224, 1000

EMPTY = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry empty()
{
    ret;
}
\0"""

Step = Callable[[], None]


def launches(count: int = LAUNCHES_A_STEP) -> Step:
    """A step of empty kernels, waited for at its end."""
    from cuda.bindings import driver

    from bench.device import check, context

    context()
    module = check(driver.cuModuleLoadData(EMPTY))
    kernel = check(driver.cuModuleGetFunction(module, b"empty"))

    def step() -> None:
        for _ in range(count):
            driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        check(driver.cuCtxSynchronize())

    return step


def gpt2(batch: int = BATCH, length: int = LENGTH, **sizes: int) -> Step:
    """A training step, waited for by reading the loss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (batch, length), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def resnet50() -> Step:
    """A training step, waited for by reading the loss."""
    import torch
    from torchvision.models import resnet50 as model_of

    torch.manual_seed(0)
    model = model_of(weights=None).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    images = torch.randn(IMAGES, 3, SIDE, SIDE, device="cuda")
    labels = torch.randint(0, CLASSES, (IMAGES,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


JOBS: dict[str, Callable[[], Step]] = {
    "gpt2": gpt2,
    "gpt2_short": lambda: gpt2(n_layer=2),
    "gpt2_xl": lambda: gpt2(XL_BATCH, XL_LENGTH, **XL),
    "resnet50": resnet50,
    "launches": launches,
}
SMALL_JOBS = {"launches": lambda: launches(FEW_LAUNCHES)}


def block(step: Step, count: int) -> dict[str, Any]:
    """Seconds of each of `count` steps, and what this process used for all of them."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "switches": after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw,
    }


def switched(step: Step, count: int, switch: Switch) -> dict[str, Any]:
    """A block of steps in each mode; the modes take turns, there and back."""
    blocks: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(count):
        for mode in reversed(MODES) if number % 2 else MODES:
            switch.turn(mode)
            blocks[mode].append(block(step, 1))
    switch.turn(ON)
    return {mode: together(parts) for mode, parts in blocks.items()}


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Blocks as one."""
    return {
        key: [s for part in parts for s in part[key]]
        if key == "step_seconds"
        else sum(part[key] for part in parts)
        for key in parts[0]
    }


def stay() -> None:
    """Keep the threads of this process where those of the other processes are."""
    processors = sorted(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        own = processors[:1] if thread == os.getpid() else processors[2:4] or processors[-1:]
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.step_time")
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--small", action="store_true", help="for the emulated GPU")
    options = parser.parse_args()
    faulthandler.enable()
    step = (JOBS | SMALL_JOBS if options.small else JOBS)[options.job]()
    for _ in range(XL_WARM_UP if options.job == "gpt2_xl" else WARM_UP):
        step()
    # A collection takes as long as some steps, and would come by chance in one way's.
    gc.collect()
    gc.disable()
    stay()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.control)
        with connection.makefile("rw") as channel:
            print(json.dumps({"name": options.name, "pid": os.getpid()}), file=channel, flush=True)
            switch: Switch | None = None
            for line in channel:
                count, *how = line.split()
                if how == ["switched"]:
                    switch = switch or Switch()
                    done = switched(step, int(count), switch)
                elif how == ["counted"]:
                    done = counts(partial(block, step, int(count)))
                else:
                    done = block(step, int(count))
                print(json.dumps(done), file=channel, flush=True)


if __name__ == "__main__":
    main()
