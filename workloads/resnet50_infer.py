"""Classify generated images with ResNet-50: weights that stay, activations that change."""

from __future__ import annotations

import _chunks
import _torch
import torch
from _common import Report, digest, guarded, options_of, parser, verify
from _train import active_ranges
from torchvision.models import resnet50

DEFAULT_STEPS = 60
SIDE, BATCH, BIG_BATCH = 224, 8, 64


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    _chunks.add_option(options_parser)
    arguments = options_parser.parse_args()
    options, digests = options_of(arguments), _chunks.Digests(arguments.chunk_digests)
    report = Report(options)
    device = _torch.setup(options)
    model = resnet50(weights=None).to(device).eval()
    batch = BIG_BATCH if options.big else BATCH
    weights = _torch.checksum([*model.parameters(), *model.buffers()])
    with torch.inference_mode():
        for step in range(options.steps):
            source = _torch.generator(options, step)
            images = torch.randn(batch, 3, SIDE, SIDE, device=device, generator=source)
            logits = model(images)
            verify(bool(torch.isfinite(logits).all()), f"step {step}: a result is not finite")
            found = _torch.checksum([*model.parameters(), *model.buffers()])
            verify(found == weights, f"step {step}: the weights have changed")
            if digests.wanted:
                digests.write(step, active_ranges())
            report.step(step, digest(found.encode(), logits.cpu().numpy()))
    report.done()


if __name__ == "__main__":
    guarded(main)
