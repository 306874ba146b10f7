"""The loop of the PyTorch programs that train: steps, checks, digests, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import _chunks
import _saving
import _torch
import torch
from _common import Options, Report, guarded, options_of, parser, verify
from torch import nn


@dataclass
class Job:
    """What is trained. `loss` gives that of a step, which must stay within `within` of `near`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], torch.Tensor]
    near: float
    within: float = 1.0
    # Parameters as bfloat16 need no autocast.
    autocast: bool = True
    # What may be lost: saved and digested is this part of the model; None is the whole of it.
    trained: nn.Module | None = None

    @property
    def state(self) -> nn.Module:
        return self.model if self.trained is None else self.trained


Make = Callable[[Options, torch.device], Job]


def _write(file: IO[bytes], job: Job, step: int) -> None:
    """What a careful program saves: parameters, optimizer, step, and both random states."""
    saved = {
        "step": step,
        "model": job.state.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(),
    }
    torch.save(saved, file)


def _read(path: Path, job: Job) -> int:
    # Not to the device: the optimizer's step counts were, and must be, in host memory.
    saved = torch.load(path, map_location="cpu", mmap=True)
    job.state.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    # Copies: what comes from the file may not lie as a generator wants it.
    torch.set_rng_state(saved["random"].clone())
    torch.cuda.set_rng_state(saved["random_cuda"].clone())
    return int(saved["step"])


def active_ranges() -> Iterator[tuple[int, int]]:
    """Address and bytes of every live block of PyTorch's allocator."""
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                yield at, block["size"]
            at += block["size"]


def _one_step(job: Job, step: int) -> float:
    with torch.autocast("cuda", torch.bfloat16) if job.autocast else nullcontext():
        loss = job.loss(step)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    return float(loss.item())


def train(description: str, make: Make, *, steps: int, digest_every: int, **setup: Any) -> None:
    """Train what `make` gives; a step's line has the loss, and now and then the state's digest."""
    options_parser = parser(description, steps=steps)
    options_parser.add_argument(
        "--digest-every",
        type=int,
        default=digest_every,
        help="steps between digests of the whole state; the loss is printed each step",
    )
    _saving.add_options(options_parser)
    _chunks.add_option(options_parser)
    arguments = options_parser.parse_args()
    options, saver = options_of(arguments), _saving.Saver(arguments)
    digests = _chunks.Digests(arguments.chunk_digests)
    report = Report(options)
    device = _torch.setup(options, **setup)
    job = make(options, device)
    for step in range(saver.load(lambda path: _read(path, job)), options.steps):
        value = _one_step(job, step)
        verify(
            math.isfinite(value) and abs(value - job.near) < job.within,
            f"step {step}: the loss is {value}, not near {job.near:.2f}",
        )
        if digests.wanted:
            digests.write(step, active_ranges())
        if step % arguments.digest_every == 0 or step == options.steps - 1:
            state = _torch.checksum(_torch.training_state(job.model, job.optimizer))
            report.step(step, state, loss=value)
        else:
            report.loss(step, value)
        saver.end_of_step(step, lambda file, step=step: _write(file, job, step))
    report.done()


def run(
    description: str | None, make: Make, *, steps: int, digest_every: int = 1, **setup: Any
) -> None:
    guarded(lambda: train(description or "", make, steps=steps, digest_every=digest_every, **setup))


def tokens_of(
    options: Options, device: torch.device, step: int, words: int, shape: tuple[int, int]
) -> torch.Tensor:
    """Return the step's random tokens: uniform, so that no model can predict them."""
    source = _torch.generator(options, step)
    return torch.randint(0, words, shape, device=device, generator=source)


def language_model(
    options: Options, device: torch.device, model: nn.Module, words: int, shape: tuple[int, int]
) -> Job:
    """Train a causal language model of transformers with AdamW on random tokens.

    The loss stays near the vocabulary's entropy, since uniform tokens cannot be predicted.
    """
    model = model.to(device)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4
    )

    def loss(step: int) -> torch.Tensor:
        tokens = tokens_of(options, device, step, words, shape)
        result: torch.Tensor = model(tokens, labels=tokens).loss
        return result

    return Job(model, optimizer, loss, math.log(words))
