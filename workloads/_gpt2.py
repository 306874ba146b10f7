"""The GPT-2 training job that gpt2.py and gpt2_xl.py run in two sizes."""

from __future__ import annotations

import _train
import torch
from _common import Options
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH = 8, 512


def run(description: str | None, sizes: dict[str, int], *, steps: int, digest_every: int) -> None:
    """Train on random tokens with AdamW under bfloat16 autocast, random weights to start with."""
    config = GPT2Config(**sizes)

    def make(options: Options, device: torch.device) -> _train.Job:
        model = GPT2LMHeadModel(config)
        return _train.language_model(options, device, model, config.vocab_size, (BATCH, LENGTH))

    _train.run(description, make, steps=steps, digest_every=digest_every)
