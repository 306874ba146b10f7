"""Train a network compiled by torch.compile; eager execution must agree.

Inductor keeps a pool of forked compiler processes beside the job, as many as there are processors,
and at most 32.
"""

from __future__ import annotations

import _torch
import torch
from _common import Report, guarded, parse, verify
from _small_net import CHECKED_STEPS, batch, eager_losses, network, optimizer_of
from torch import nn

DEFAULT_STEPS = 100


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    device = _torch.setup(options)
    expected = eager_losses(options, device, min(CHECKED_STEPS, options.steps))
    model = network(options, device)
    optimizer = optimizer_of(model)
    compiled = torch.compile(model)
    for step in range(options.steps):
        x, y = batch(options, device, step)
        loss = nn.functional.cross_entropy(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = float(loss.item())
        if step < len(expected):
            verify(
                abs(value - expected[step]) <= 1e-3 * abs(expected[step]),
                f"step {step}: loss {value} but eager execution says {expected[step]}",
            )
        state = _torch.checksum(_torch.training_state(model, optimizer))
        report.step(step, state, loss=value)
    report.done()


if __name__ == "__main__":
    guarded(main)
