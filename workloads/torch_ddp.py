"""Data-parallel training by torchrun: a rank on each GPU, joined by NCCL."""

from __future__ import annotations

import math

import _ranks
import _torch
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, verify
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_STEPS = 200
WIDTH, HIDDEN, ROWS, PASSED = 256, 1024, 64, 1 << 16


def ring(sent: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What the rank before has sent: each sends to the next one, in one group."""
    if ranks == 1:  # nobody sends to itself
        return sent.clone()
    received = torch.empty_like(sent)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    operations = [
        dist.P2POp(dist.isend, sent, after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def train(options: Options, rank: int, ranks: int) -> None:
    device = _torch.setup(options)
    others = dist.new_group(list(range(ranks)))  # a second communicator, used between the first's
    hidden = HIDDEN * (4 if options.big else 1)
    model = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)).to(device)
    joined = DistributedDataParallel(model, device_ids=[options.device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    passed = torch.arange(PASSED, device=device, dtype=torch.int32) + rank
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        rows = torch.randn(
            ROWS, WIDTH, device=device, generator=_torch.generator(options, step * ranks + rank)
        )
        loss = (joined(rows) - rows).square().mean()
        loss.backward()
        passed = ring(passed, rank, ranks) * 3 + step
        optimizer.step()
        optimizer.zero_grad()
        both, total = loss.detach().clone(), passed.sum(dtype=torch.int64)
        dist.all_reduce(both)
        dist.all_reduce(total, group=others)
        value = float(both.item())
        verify(
            math.isfinite(value) and 0 < value < 2 * ranks,
            f"step {step}: the losses are {value}",
        )
        if report:
            state = [*_torch.training_state(model, optimizer), passed, total]
            report.step(step, _torch.checksum(state), loss=value)
    dist.barrier()
    if report:
        report.done()


def main() -> None:
    _ranks.run(_ranks.parser(__doc__ or "", steps=DEFAULT_STEPS).parse_args(), train)


if __name__ == "__main__":
    guarded(main)
