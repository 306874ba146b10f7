"""Train GPT-2 XL on several GPUs: DDP under torchrun, a rank on each, batches of 8 x 512 tokens."""

from __future__ import annotations

import math

import _ranks
import _torch
import _train
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, verify
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

DEFAULT_STEPS = 30
SIZES = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
BATCH, LENGTH = 8, 512
DIGEST_EVERY = 10


def train(options: Options, rank: int, ranks: int) -> None:
    device = _torch.setup(options)
    config = GPT2Config(**SIZES)
    # Ranks that draw so many numbers on the processor, all at once, take minutes.
    with device:
        model = GPT2LMHeadModel(config)
    joined = DistributedDataParallel(
        model, device_ids=[options.device], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    near = math.log(config.vocab_size)  # random tokens cannot be predicted
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        tokens = _train.tokens_of(
            options, device, step * ranks + rank, config.vocab_size, (BATCH, LENGTH)
        )
        with torch.autocast("cuda", torch.bfloat16):
            loss = joined(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        value = float(total.item()) / ranks
        verify(
            math.isfinite(value) and abs(value - near) < 1,
            f"step {step}: the loss is {value}, not near {near:.2f}",
        )
        if report and (step % DIGEST_EVERY == 0 or step == options.steps - 1):
            state = _torch.checksum(_torch.training_state(model, optimizer))
            report.step(step, state, loss=value)
        elif report:
            report.loss(step, value)
    dist.barrier()
    if report:
        report.done()


def main() -> None:
    _ranks.run(_ranks.parser(__doc__ or "", steps=DEFAULT_STEPS).parse_args(), train)


if __name__ == "__main__":
    guarded(main)
