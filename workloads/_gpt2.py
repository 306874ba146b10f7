"""The GPT-2 training job that gpt2.py and gpt2_xl.py run in two sizes."""

from __future__ import annotations

import math

import _torch
import torch
from _common import Report, guarded, options_of, parser, verify
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH = 8, 512


def train(description: str, sizes: dict[str, int], *, steps: int, digest_every: int) -> None:
    """Train on random tokens with AdamW under bfloat16 autocast, random weights to start with."""
    options_parser = parser(description, steps=steps)
    options_parser.add_argument(
        "--digest-every",
        type=int,
        default=digest_every,
        help="steps between digests of the whole state; the loss is printed each step",
    )
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    report = Report(options)
    device = _torch.setup(options)
    config = GPT2Config(**sizes)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        tokens = torch.randint(
            0,
            config.vocab_size,
            (BATCH, LENGTH),
            device=device,
            generator=_torch.generator(options, step),
        )
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.item())
        # Uniform random tokens cannot be predicted: the loss stays near the vocabulary's entropy.
        verify(
            abs(value - math.log(config.vocab_size)) < 1,
            f"step {step}: the loss is {value}, not near {math.log(config.vocab_size):.2f}",
        )
        if step % arguments.digest_every == 0 or step == options.steps - 1:
            state = _torch.checksum(_torch.training_state(model, optimizer))
            report.step(step, state, loss=value)
        else:
            report.loss(step, value)
    report.done()


def run(description: str | None, sizes: dict[str, int], *, steps: int, digest_every: int) -> None:
    guarded(lambda: train(description or "", sizes, steps=steps, digest_every=digest_every))
