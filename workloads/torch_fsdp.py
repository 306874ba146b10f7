"""Train an OPT model whose parameters are sharded over several GPUs: FSDP2 under torchrun."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import _ranks
import _torch
import _train
import torch
import torch.distributed as dist
from _common import Options, Report, guarded, verify
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import OPTConfig, OPTForCausalLM

DEFAULT_STEPS = 30
DIGEST_EVERY = 10
INITIAL = 0.02
# Hidden width, layers, heads, and the rows of 512 tokens that each rank has in a step.
SIZES = {"tiny": (256, 4, 8, 4), "1.3b": (2048, 24, 32, 8), "6.7b": (4096, 32, 32, 4)}
LENGTH = 512


def config_of(size: str) -> OPTConfig:
    hidden, layers, heads, _ = SIZES[size]
    return OPTConfig(
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # No layer is left out at random: which one would follow from Python's generator.
        layerdrop=0.0,
        # Parameters that are one would be two once memory is given to them.
        tie_word_embeddings=False,
        use_cache=False,
    )


def sharded(config: OPTConfig, ranks: int) -> nn.Module:
    """Return the model without memory, each layer cut into as many parts as there are ranks."""
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    mesh = init_device_mesh("cuda", (ranks,))
    # Parameters and optimizer state are kept as float32, and gradients are added up in it.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fill(model: nn.Module, options: Options, rank: int) -> None:
    """Give this rank's parts their memory and first values, which no rank ever has whole."""
    device = torch.device("cuda", options.device)
    model.to_empty(device=device)
    verify(not list(model.buffers()), "the model has buffers, which nothing fills")
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            verify(isinstance(parameter, DTensor), f"{name} is not sharded")
            own = parameter.to_local()
            if parameter.ndim > 1:
                source = torch.Generator(device=device)
                source.manual_seed((options.seed * 1_000_003 + number) * 1_009 + rank)
                own.normal_(0, INITIAL, generator=source)
            else:  # of a layer's norm, or a bias
                own.fill_(0 if name.endswith("bias") else 1)


def own_parts(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What this rank has of tensors that are sharded."""
    for tensor in tensors:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(options: Options, rank: int, ranks: int, size: str) -> None:
    device = _torch.setup(options)
    config = config_of(size)
    model = sharded(config, ranks)
    fill(model, options, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = SIZES[size][3]
    near = math.log(config.vocab_size)  # random tokens cannot be predicted
    report = Report(options) if rank == 0 else None
    for step in range(options.steps):
        tokens = _train.tokens_of(
            options, device, step * ranks + rank, config.vocab_size, (rows, LENGTH)
        )
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        value = float(total.item()) / ranks
        verify(
            math.isfinite(value) and abs(value - near) < 2,
            f"step {step}: the loss is {value}, not near {near:.2f}",
        )
        digested = step % DIGEST_EVERY == 0 or step == options.steps - 1
        state = ""
        if digested:  # by all ranks together
            own = own_parts(_torch.training_state(model, optimizer))
            state = _ranks.checksum(options, own)
        if report and digested:
            report.step(step, state, loss=value)
        elif report:
            report.loss(step, value)
    dist.barrier()
    if report:
        report.done()


def arguments_of() -> argparse.Namespace:
    options_parser = _ranks.parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument(
        "--size", choices=SIZES, default="1.3b", help="parameters of the model"
    )
    return options_parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    _ranks.run(arguments, lambda options, rank, ranks: train(options, rank, ranks, arguments.size))


if __name__ == "__main__":
    guarded(main)
