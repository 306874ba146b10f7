"""The network that torch_graphs.py and torch_compile.py train, and its eager reference."""

from __future__ import annotations

import _torch
import torch
from _common import Options
from torch import nn

BATCH, WIDTH, CLASSES = 256, 512, 10
CHECKED_STEPS = 5


def network(options: Options, device: torch.device) -> nn.Module:
    """Return a network whose weights follow from the seed."""
    torch.manual_seed(options.seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device)


def batch(options: Options, device: torch.device, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = _torch.generator(options, step)
    x = torch.randn(BATCH, WIDTH, device=device, generator=source)
    return x, torch.randint(0, CLASSES, (BATCH,), device=device, generator=source)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with its step counts on the device, as graphs need them."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)


def eager_losses(options: Options, device: torch.device, steps: int) -> list[float]:
    """Return the losses of the first steps without graphs or compilation."""
    model = network(options, device)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        x, y = batch(options, device, step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()))
    return losses
