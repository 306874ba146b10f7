"""Train a Qwen2 model (at the big scale shaped like Qwen2.5-1.5B) with AdamW, bfloat16 autocast."""

from __future__ import annotations

import _train
import torch
from _common import Options
from _qwen2 import config
from transformers import Qwen2ForCausalLM


def make(options: Options, device: torch.device) -> _train.Job:
    chosen = config(options.big)
    shape = (4, 512) if options.big else (4, 64)
    model = Qwen2ForCausalLM(chosen)
    job = _train.language_model(options, device, model, chosen.vocab_size, shape)
    job.within = 2.0
    return job


if __name__ == "__main__":
    _train.run(__doc__, make, steps=40, digest_every=10)
