"""Data-parallel training by torchrun: a rank on each GPU, joined by NCCL."""

from __future__ import annotations

import math
import os
import sys

import _torch
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, parse, verify
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_STEPS = 200
RANKS = 2
WIDTH, HIDDEN, ROWS, PASSED = 256, 1024, 64, 1 << 16


def launch() -> None:
    """Become torchrun, which starts the ranks and watches them."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    os.environ["OMP_NUM_THREADS"] = "1"
    # Multicast memory cannot be saved.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.execv(sys.executable, [sys.executable, *words, *sys.argv])


def ring(sent: torch.Tensor, rank: int) -> torch.Tensor:
    """What the rank before has sent: each sends to the next one, in one group."""
    received = torch.empty_like(sent)
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    operations = [
        dist.P2POp(dist.isend, sent, after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def train(options: Options, rank: int) -> None:
    device = _torch.setup(options)
    others = dist.new_group(list(range(RANKS)))  # a second communicator, used between the first's
    hidden = HIDDEN * (4 if options.big else 1)
    model = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)).to(device)
    joined = DistributedDataParallel(model, device_ids=[options.device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    passed = torch.arange(PASSED, device=device, dtype=torch.int32) + rank
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        rows = torch.randn(
            ROWS, WIDTH, device=device, generator=_torch.generator(options, step * RANKS + rank)
        )
        loss = (joined(rows) - rows).square().mean()
        loss.backward()
        passed = ring(passed, rank) * 3 + step
        optimizer.step()
        optimizer.zero_grad()
        both, total = loss.detach().clone(), passed.sum(dtype=torch.int64)
        dist.all_reduce(both)
        dist.all_reduce(total, group=others)
        value = float(both.item())
        verify(math.isfinite(value) and 0 < value < 4, f"step {step}: the losses are {value}")
        if report:
            state = [*_torch.training_state(model, optimizer), passed, total]
            report.step(step, _torch.checksum(state), loss=value)
    dist.barrier()
    if report:
        report.done()


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    if "RANK" not in os.environ:
        launch()
    rank = int(os.environ["RANK"])
    options = Options(**{**vars(options), "device": int(os.environ["LOCAL_RANK"])})
    torch.cuda.set_device(options.device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", options.device))
    train(options, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    guarded(main)
