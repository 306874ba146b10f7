"""Train ResNet-50 with cuDNN on images that two DataLoader workers make and pin."""

from __future__ import annotations

import math
from collections.abc import Iterator

import _train
import torch
from _common import Options
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


def batches(images: Images, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of the steps from `first` on."""
    return iter(
        DataLoader(
            images,
            batch_size=BATCH,
            sampler=range(first * BATCH, len(images)),
            num_workers=2,
            pin_memory=True,
            persistent_workers=True,
        )
    )


def make(options: Options, device: torch.device) -> _train.Job:
    model = resnet50(weights=None).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    started: list[Iterator[tuple[torch.Tensor, torch.Tensor]]] = []

    def loss(step: int) -> torch.Tensor:
        if not started:
            started.append(batches(Images(options), step))
        images, labels = next(started[0])
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        result: torch.Tensor = criterion(model(images), labels)
        return result

    # Random labels can be learnt by heart, so only what is not finite is wrong.
    return _train.Job(model, optimizer, loss, math.log(CLASSES), within=math.inf, autocast=False)


if __name__ == "__main__":
    # Only warned about: max pooling's backward is marked as not deterministic, but sums without
    # atomics in the memory layout used here.
    _train.run(__doc__, make, steps=DEFAULT_STEPS, warn_only=True)
