"""Train ResNet-50 with cuDNN on images that two DataLoader workers make and pin."""

from __future__ import annotations

import math

import _torch
import torch
from _common import Options, Report, guarded, parse, verify
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50

DEFAULT_STEPS = 30
BATCH, SIDE, CLASSES = 32, 224, 1000


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images drawn from their index alone, so that every run and every worker makes the same."""

    def __init__(self, options: Options) -> None:
        self.seed, self.count = options.seed, options.steps * BATCH

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = int(torch.randint(0, CLASSES, (), generator=source))
        return torch.randn(3, SIDE, SIDE, generator=source), label


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    # Only warned about: max pooling's backward is marked as not deterministic, but sums without
    # atomics in the memory layout used here.
    device = _torch.setup(options, warn_only=True)
    model = resnet50(weights=None).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(
        Images(options),
        batch_size=BATCH,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
    )
    for step, (images, labels) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = float(loss.item())
        verify(math.isfinite(value), f"step {step}: the loss is {value}")
        state = _torch.checksum(_torch.training_state(model, optimizer))
        report.step(step, state, loss=value)
    report.done()


if __name__ == "__main__":
    guarded(main)
