"""Train BERT (at the big scale BERT large) to fill in masked tokens, AdamW, bfloat16 autocast."""

from __future__ import annotations

import _torch
import _train
import torch
from _common import Options
from transformers import BertConfig, BertForMaskedLM

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
BIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
MASK, SHARE = 103, 0.15
IGNORED = -100  # by the loss


def make(options: Options, device: torch.device) -> _train.Job:
    config = BertConfig(**(BIG if options.big else SMALL))
    words, shape = config.vocab_size, (16, 512) if options.big else (4, 64)
    model = BertForMaskedLM(config)
    job = _train.language_model(options, device, model, words, shape)
    job.within = 2.0

    def loss(step: int) -> torch.Tensor:
        tokens = _train.tokens_of(options, device, step, words, shape)
        source = _torch.generator(options, step)
        hidden = torch.rand(shape, device=device, generator=source) < SHARE
        # Only at masked places: elsewhere the model could copy its input.
        labels = tokens.masked_fill(~hidden, IGNORED)
        result: torch.Tensor = model(tokens.masked_fill(hidden, MASK), labels=labels).loss
        return result

    job.loss = loss
    return job


if __name__ == "__main__":
    _train.run(__doc__, make, steps=40, digest_every=10)
