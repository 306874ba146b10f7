"""Fine-tune small adapters beside the frozen weights of a Qwen2 model (1.5 B at the big scale)."""

from __future__ import annotations

import math

import _train
import torch
from _common import Options
from _qwen2 import config
from torch import nn
from transformers import Qwen2ForCausalLM

RANK, ALPHA = 16, 32


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices added to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(RANK, base.in_features))
        # Zero, so that training starts at the frozen model.
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))
        nn.init.normal_(self.down, std=1 / math.sqrt(base.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = nn.functional.linear(x, self.down.to(x.dtype))
        change = nn.functional.linear(down, self.up.to(x.dtype))
        result: torch.Tensor = self.base(x) + change * (ALPHA / RANK)
        return result


def adapt(model: nn.Module) -> nn.ModuleDict:
    """Freeze the model, adapt its queries and values, and return the adapters' parameters."""
    model.requires_grad_(False)
    adapters = nn.ModuleDict()
    for name, module in list(model.named_modules()):
        for part in ("q_proj", "v_proj"):
            base = getattr(module, part, None)
            if isinstance(base, nn.Linear):
                adapted = Adapted(base)
                setattr(module, part, adapted)
                own = nn.ParameterDict({"down": adapted.down, "up": adapted.up})
                adapters[f"{name}.{part}".replace(".", "/")] = own
    return adapters


def make(options: Options, device: torch.device) -> _train.Job:
    chosen = config(options.big)
    model = Qwen2ForCausalLM(chosen).to(device, torch.bfloat16)
    adapters = adapt(model)
    shape = (4, 512) if options.big else (4, 64)
    job = _train.language_model(options, device, model, chosen.vocab_size, shape)
    # The frozen weights follow from the seed; what a user would save are the adapters.
    job.within, job.autocast, job.trained = 2.0, False, adapters
    return job


if __name__ == "__main__":
    _train.run(__doc__, make, steps=60, digest_every=1)
