"""Train GPT-2 XL on several GPUs: DDP under torchrun, a rank on each, batches of 8 x 512 tokens."""

from __future__ import annotations

import math
import os
import sys

import _torch
import _train
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, options_of, parser, verify
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

DEFAULT_STEPS = 30
RANKS = 2
SIZES = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
BATCH, LENGTH = 8, 512
DIGEST_EVERY = 10


def launch(ranks: int) -> None:
    """Become torchrun, which starts the ranks and watches them."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.environ["OMP_NUM_THREADS"] = "1"
    # Multicast memory cannot be saved.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.execv(sys.executable, [sys.executable, *words, *sys.argv])


def train(options: Options, rank: int, ranks: int) -> None:
    device = _torch.setup(options)
    config = GPT2Config(**SIZES)
    model = GPT2LMHeadModel(config).to(device)
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
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--ranks", type=int, default=RANKS, help="GPUs to train on")
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    if "RANK" not in os.environ:
        launch(arguments.ranks)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = Options(**{**vars(options), "device": int(os.environ["LOCAL_RANK"])})
    torch.cuda.set_device(options.device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", options.device))
    train(options, rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    guarded(main)
