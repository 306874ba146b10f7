"""Two ranks that use two communicators of NCCL in opposite orders, by all kinds of operations."""

from __future__ import annotations

import os

import _torch
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, parse, verify
from torch_ddp import RANKS, launch

DEFAULT_STEPS = 200
GROUPS = 2
SMALL, LARGE = 1 << 10, 1 << 21  # numbers, for which NCCL takes other ways
MODULUS = 1_000_003


class Crossed:
    """A communicator, and what its operations take and give."""

    def __init__(self, number: int, rank: int, device: torch.device) -> None:
        self.group = dist.new_group(list(range(RANKS)))
        self.rank = rank
        self.large = torch.arange(LARGE, device=device, dtype=torch.int64) % MODULUS + number + rank
        self.small = self.large[:SMALL].clone()
        self.all = torch.zeros(RANKS * SMALL, device=device, dtype=torch.int64)
        self.part = torch.zeros(SMALL // RANKS, device=device, dtype=torch.int64)
        self.passed = torch.zeros(SMALL, device=device, dtype=torch.int64)

    def tensors(self) -> list[torch.Tensor]:
        return [self.large, self.small, self.all, self.part, self.passed]

    def issue(self, *, large: bool) -> list[dist.Work]:
        """Begin some operations; the results are there once all have been waited for."""
        after, before = (self.rank + 1) % RANKS, (self.rank - 1) % RANKS
        work = [
            dist.all_gather_into_tensor(self.all, self.small, group=self.group, async_op=True),
            dist.reduce_scatter_tensor(self.part, self.small, group=self.group, async_op=True),
            *dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.small, after, group=self.group),
                    dist.P2POp(dist.irecv, self.passed, before, group=self.group),
                ]
            ),
        ]
        if large:
            work.append(dist.all_reduce(self.large, group=self.group, async_op=True))
        return [one for one in work if one is not None]

    def take(self, step: int) -> None:
        """Make what the next operations are given from what the last ones gave."""
        self.small += self.passed * 3 + self.all[-SMALL:] + step + self.rank
        self.small[: SMALL // RANKS] += self.part
        self.small %= MODULUS
        self.large %= MODULUS


def train(options: Options, rank: int) -> None:
    device = _torch.setup(options)
    crossed = [Crossed(number, rank, device) for number in range(GROUPS)]
    report = Report(options) if rank == 0 else None
    for step in range(-1, options.steps):
        # The first time connects: it waits for the other rank, and so is in one order.
        order = crossed if step < 0 or rank == 0 else crossed[::-1]
        work = [one for part in order for one in part.issue(large=step % 8 == 7 or step < 0)]
        for one in work:
            one.wait()
        for part in crossed:
            part.take(step)
        state = [tensor for part in crossed for tensor in part.tensors()]
        digest = _torch.checksum(state)
        verify(int(crossed[0].small.max()) < MODULUS, f"step {step}: a number is too large")
        if report and step >= 0:
            report.step(step, digest)
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
