"""Train a vision transformer (at the big scale ViT-L-16) with AdamW, bfloat16 autocast."""

from __future__ import annotations

import math

import _torch
import _train
import torch
from _common import Options
from torch import nn
from torchvision.models import VisionTransformer, vit_l_16

CLASSES, SIDE = 1000, 224


def network(big: bool) -> nn.Module:
    if big:
        return vit_l_16(weights=None)
    return VisionTransformer(
        image_size=SIDE, patch_size=32, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=512
    )


def make(options: Options, device: torch.device) -> _train.Job:
    model = network(options.big).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss()
    batch = 32 if options.big else 4

    def loss(step: int) -> torch.Tensor:
        source = _torch.generator(options, step)
        images = torch.randn(batch, 3, SIDE, SIDE, device=device, generator=source)
        labels = torch.randint(0, CLASSES, (batch,), device=device, generator=source)
        result: torch.Tensor = criterion(model(images), labels)
        return result

    # Labels that have nothing to do with the images: the loss stays near their entropy.
    return _train.Job(model, optimizer, loss, math.log(CLASSES), within=2.0)


if __name__ == "__main__":
    _train.run(__doc__, make, steps=40, digest_every=10)
