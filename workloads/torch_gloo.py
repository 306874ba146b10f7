"""Data-parallel training by torchrun: two ranks on one GPU, joined by TCP (gloo)."""

from __future__ import annotations

import math
import os
import sys

import _torch
import torch
import torch.distributed as dist
from _common import Report, guarded, parse, verify
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_STEPS = 60
RANKS = 2
WIDTH, HIDDEN, ROWS = 256, 1024, 64


def launch() -> None:
    """Become torchrun, which starts the ranks and watches them."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *words, *sys.argv])


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    if "RANK" not in os.environ:
        launch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = _torch.setup(options)
    hidden = HIDDEN * (4 if options.big else 1)
    model = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)).to(device)
    joined = DistributedDataParallel(model, device_ids=[options.device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        rows = torch.randn(
            ROWS, WIDTH, device=device, generator=_torch.generator(options, step * RANKS + rank)
        )
        loss = (joined(rows) - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = loss.detach().clone()
        dist.all_reduce(both)
        value = float(both.item())
        verify(math.isfinite(value) and 0 < value < 4, f"step {step}: the losses are {value}")
        if report:
            report.step(step, _torch.checksum(_torch.training_state(model, optimizer)), loss=value)
    dist.barrier()
    dist.destroy_process_group()
    if report:
        report.done()


if __name__ == "__main__":
    guarded(main)
