"""Train an OPT model (at the big scale that of 1.3 B parameters) with AdamW, bfloat16 autocast."""

from __future__ import annotations

import _train
import torch
from _common import Options
from transformers import OPTConfig, OPTForCausalLM

SMALL = {
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
BIG = {
    "hidden_size": 2048,
    "word_embed_proj_dim": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
}


def make(options: Options, device: torch.device) -> _train.Job:
    # No layer is left out at random: which one would follow from Python's generator.
    config = OPTConfig(**(BIG if options.big else SMALL), layerdrop=0.0)
    shape = (8, 512) if options.big else (4, 64)
    job = _train.language_model(options, device, OPTForCausalLM(config), config.vocab_size, shape)
    job.within = 2.0
    return job


if __name__ == "__main__":
    _train.run(__doc__, make, steps=40, digest_every=10)
