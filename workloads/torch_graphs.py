"""Train by replaying a captured CUDA graph of a whole training step."""

from __future__ import annotations

import _torch
import torch
from _common import Report, guarded, parse, verify
from _small_net import CHECKED_STEPS, batch, eager_losses, network, optimizer_of
from torch import nn

DEFAULT_STEPS = 100
WARM_UP = 3


class Graphed:
    """The training step as a graph over static inputs."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.graph = torch.cuda.CUDAGraph()

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def capture(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Warm up beside the default stream, put the state back, then capture."""
        self.x, self.y = x.clone(), y.clone()
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.loss = self._step().detach()
        # In place: the graph holds the addresses.
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(before[name])
            for state in self.optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        value.zero_()

    def run(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return float(self.loss.item())


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    device = _torch.setup(options)
    expected = eager_losses(options, device, min(CHECKED_STEPS, options.steps))
    model = network(options, device)
    optimizer = optimizer_of(model)
    graphed = Graphed(model, optimizer)
    graphed.capture(*batch(options, device, 0))
    for step in range(options.steps):
        loss = graphed.run(*batch(options, device, step))
        if step < len(expected):
            verify(
                abs(loss - expected[step]) <= 1e-4 * abs(expected[step]),
                f"step {step}: loss {loss} but eager execution says {expected[step]}",
            )
        state = _torch.checksum(_torch.training_state(model, optimizer))
        report.step(step, state, loss=loss)
    report.done()


if __name__ == "__main__":
    guarded(main)
