"""Train a model whose layers lie on several GPUs: a pipeline of stages under torchrun.

Each stage sends what it has computed to the next one, and gradients come back.
"""

from __future__ import annotations

import math

import _ranks
import _torch
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, verify
from torch import nn

DEFAULT_STEPS = 200
WIDTH, HIDDEN, ROWS, PARTS = 256, 1024, 64, 4


class Stage:
    """The layers of one rank, and what passes between them and those of its neighbours."""

    def __init__(self, options: Options, rank: int, ranks: int) -> None:
        self.rank, self.last = rank, rank == ranks - 1
        self._options, self._device = options, torch.device("cuda", options.device)
        torch.manual_seed(options.seed * 1_009 + rank)
        hidden = HIDDEN * (4 if options.big else 1)
        layers = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU())
        self.model = nn.Sequential(*layers, nn.Linear(hidden, WIDTH)).to(self._device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def rows(self, number: int) -> torch.Tensor:
        """The data of a part of a step, which the first stage reads and the last one compares."""
        source = _torch.generator(self._options, number)
        return torch.randn(ROWS, WIDTH, device=self._device, generator=source)

    def forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what has come in and what has come out, or the loss of the last stage."""
        if self.rank:
            given = torch.empty(ROWS, WIDTH, device=self._device)
            dist.recv(given, self.rank - 1)
            given.requires_grad_()
        else:
            given = self.rows(number)
        made = self.model(given)
        if self.last:
            return given, (made - self.rows(number)).square().mean() / PARTS
        dist.send(made.detach(), self.rank + 1)
        return given, made

    def backward(self, given: torch.Tensor, made: torch.Tensor) -> None:
        if self.last:
            made.backward()
        else:
            gradient = torch.empty_like(made)
            dist.recv(gradient, self.rank + 1)
            made.backward(gradient)
        if self.rank:
            assert given.grad is not None
            dist.send(given.grad, self.rank - 1)

    def step(self, step: int) -> torch.Tensor:
        """All parts go through all stages and back. Return the loss, which the last stage has."""
        parts = [self.forward(step * PARTS + part) for part in range(PARTS)]
        for given, made in reversed(parts):
            self.backward(given, made)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.last:
            return torch.stack([made.detach() for _, made in parts]).sum()
        return torch.zeros((), device=self._device)


def train(options: Options, rank: int, ranks: int) -> None:
    _torch.setup(options)
    stage = Stage(options, rank, ranks)
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        loss = stage.step(step)
        dist.broadcast(loss, ranks - 1)
        value = float(loss.item())
        verify(math.isfinite(value) and 0 < value < 4, f"step {step}: the loss is {value}")
        state = _ranks.checksum(options, _torch.training_state(stage.model, stage.optimizer))
        if report:
            report.step(step, state, loss=value)
    dist.barrier()
    if report:
        report.done()


def main() -> None:
    _ranks.run(_ranks.parser(__doc__ or "", steps=DEFAULT_STEPS).parse_args(), train)


if __name__ == "__main__":
    guarded(main)
