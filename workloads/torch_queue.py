"""Two processes that hand each other CUDA tensors by torch.multiprocessing queues."""

from __future__ import annotations

from typing import Any

import _torch
import torch
import torch.multiprocessing as mp
from _common import Options, Report, guarded, parse, verify

DEFAULT_STEPS = 60
SHARED, WIDTH = 4, 512


def width_of(options: Options) -> int:
    return WIDTH * (8 if options.big else 1)


def work(options: Options, requests: Any, answers: Any) -> None:
    """Change what was given at first in each step, and answer with a tensor of one's own."""
    _torch.setup(options)
    held: list[torch.Tensor] = requests.get()
    own = [torch.zeros_like(held[0]) for _ in range(2)]
    step = 0
    while (fresh := requests.get()) is not None:
        for tensor in held:
            tensor.mul_(0.9).add_(fresh)
        # The other process may still read the one before.
        mine = own[step % 2]
        mine.copy_(fresh @ held[step % SHARED])
        del fresh
        torch.cuda.synchronize()
        answers.put(mine)
        step += 1
    del held, own
    answers.put(None)


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    context = mp.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(options, requests, answers))
    worker.start()
    device = _torch.setup(options)
    report = Report(options)
    width = width_of(options)
    generator = _torch.generator(options, 1)
    held = [torch.randn(width, width, device=device, generator=generator) for _ in range(SHARED)]
    requests.put(held)
    for step in range(options.steps):
        generator = _torch.generator(options, step + 2)
        fresh = torch.randn(width, width, device=device, generator=generator) / width
        expected = [tensor * 0.9 + fresh for tensor in held]
        requests.put(fresh)
        theirs = answers.get()
        for mine, right in zip(held, expected, strict=True):
            verify(torch.allclose(mine, right), f"step {step}: the worker's change is not here")
        report.step(step, _torch.checksum([*held, theirs]))
        del theirs, fresh
    requests.put(None)
    verify(answers.get() is None, "the worker answers otherwise at its end")
    worker.join()
    verify(worker.exitcode == 0, f"the worker ended with {worker.exitcode}")
    report.done()


if __name__ == "__main__":
    guarded(main)
