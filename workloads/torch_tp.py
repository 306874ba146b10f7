"""Decode with a model cut over several GPUs by columns and rows, replaying a captured CUDA graph.

The graph of a token has the all-reduces of NCCL and the key-value cache's update in it.
"""

from __future__ import annotations

import math

import _ranks
import _torch
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, verify
from torch import nn
from torch.nn import functional

DEFAULT_STEPS = 100
TOKENS_A_STEP, WARM_UP = 16, 3
BATCH, LENGTH, LAYERS = 8, 512, 4
HIDDEN, HEAD = 2048, 128
# Each rank has so much: the model is the wider, the more ranks there are.
HEADS, FEED, WORDS = 8, 2816, 16000


def weights(source: torch.Generator, *shape: int) -> nn.Parameter:
    """Return random weights that keep the size of what they are multiplied with."""
    values = torch.randn(*shape, device=source.device, generator=source)
    return nn.Parameter((values / math.sqrt(shape[-1])).bfloat16(), requires_grad=False)


def summed(part: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the sum of all ranks' parts, each of which has the size of the sum."""
    dist.all_reduce(part)
    return part / math.sqrt(ranks)


def norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


class Layer(nn.Module):
    """One rank's heads and its part of the feed-forward network."""

    def __init__(self, source: torch.Generator, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        # Cut by columns are those that come first, by rows those whose results are summed.
        self.attention = weights(source, 3 * HEADS * HEAD, HIDDEN)
        self.out = weights(source, HIDDEN, HEADS * HEAD)
        self.gate = weights(source, 2 * FEED, HIDDEN)
        self.down = weights(source, HIDDEN, FEED)
        empty = torch.zeros(2, BATCH, HEADS, LENGTH, HEAD, device=source.device).bfloat16()
        self.register_buffer("cache", empty)

    def forward(self, x: torch.Tensor, turned: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """`turned` are the position's cosines and sines, `at` the position."""
        found = functional.linear(norm(x), self.attention).view(BATCH, 3, HEADS, HEAD)
        queries, keys, values = (
            rotated(found[:, 0], turned),
            rotated(found[:, 1], turned),
            found[:, 2],
        )
        places = torch.arange(LENGTH, device=x.device)
        new = torch.stack([keys, values]).unsqueeze(3)
        self.cache.copy_(torch.where((places == at)[:, None], new, self.cache))
        scores = (queries.unsqueeze(2) @ self.cache[0].mT).float() / math.sqrt(HEAD)
        shares = scores.masked_fill(places > at, -math.inf).softmax(-1).bfloat16()
        seen = (shares @ self.cache[1]).view(BATCH, HEADS * HEAD)
        x = x + summed(functional.linear(seen, self.out), self._ranks)
        gate, fed = functional.linear(norm(x), self.gate).chunk(2, -1)
        fed = functional.linear(functional.silu(gate) * fed, self.down)
        return x + summed(fed, self._ranks)


def rotated(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Turn pairs of each head by angles that grow with the position."""
    cosines, sines = turned.chunk(2, -1)
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cosines - two * sines, two * cosines + one * sines], -1).bfloat16()


def angles(device: torch.device) -> torch.Tensor:
    """Return cosines and sines by position."""
    speeds = 10_000.0 ** -(torch.arange(HEAD // 2, device=device) / (HEAD // 2))
    found = torch.arange(LENGTH, device=device)[:, None] * speeds
    return torch.cat([found.cos(), found.sin()], -1)


class Decoder(nn.Module):
    """Everything that a token's step reads or writes lies at addresses that stay."""

    def __init__(self, options: Options, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__()
        shared = _torch.generator(options, 0)
        self._ranks, self._words = ranks, WORDS * ranks
        self.words = weights(shared, self._words, HIDDEN)
        own = _torch.generator(options, 1 + rank)
        self.layers = nn.ModuleList(Layer(own, ranks) for _ in range(LAYERS))
        self.head = weights(own, WORDS, HIDDEN)
        self.register_buffer("turned", angles(device))
        self.register_buffer(
            "first", torch.randint(self._words, (BATCH,), device=device, generator=shared)
        )
        self.register_buffer("tokens", self.first.clone())
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_buffer("logits", torch.zeros(BATCH, self._words, device=device))
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        """Go back to the first token."""
        self.tokens.copy_(self.first)
        self.at.zero_()
        for layer in self.layers:
            layer.cache.zero_()

    def token(self) -> None:
        """Put the most likely next tokens in the place of the last ones."""
        x = functional.embedding(self.tokens, self.words)
        turned = functional.embedding(self.at, self.turned)
        for layer in self.layers:
            x = layer(x, turned, self.at)
        own = functional.linear(norm(x), self.head)
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(parts, own)
        self.logits.copy_(torch.cat(parts, -1))
        self.tokens.copy_(self.logits.argmax(-1))
        # A full cache begins anew: later places are masked until they are written again.
        self.at.copy_((self.at + 1) % LENGTH)

    def capture(self) -> torch.Tensor:
        """Capture a token's step. Return the first token's logits, computed without the graph."""
        self.begin()
        self.token()
        expected = self.logits.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.token()
        torch.cuda.current_stream().wait_stream(side)
        # NCCL's watchdog asks for events meanwhile, in another thread.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.token()
        self.begin()
        return expected

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        """A communicator ends only after the graphs that have captured it."""
        torch.cuda.synchronize()
        self._graph.reset()


@torch.inference_mode()
def decode(options: Options, rank: int, ranks: int) -> None:
    device = _torch.setup(options)
    model = Decoder(options, rank, ranks, device)
    expected = model.capture()
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        text = []
        for number in range(TOKENS_A_STEP):
            model.replay()
            text.append(model.tokens.clone())
            if step == number == 0:
                error = float((model.logits - expected).abs().max() / expected.abs().max())
                verify(error < 5e-2, f"the graph's first logits are off by {error:.1e}")
        state = [*model.parameters(), *model.buffers(), *text]
        said = _ranks.checksum(options, state)
        if report:
            report.step(step, said)
    model.release()
    dist.barrier()
    if report:
        report.done()


def main() -> None:
    _ranks.run(_ranks.parser(__doc__ or "", steps=DEFAULT_STEPS).parse_args(), decode)


if __name__ == "__main__":
    guarded(main)
