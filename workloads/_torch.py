"""Deterministic PyTorch for the workloads: import this before torch."""

from __future__ import annotations

import os

# cuBLAS and the allocator read these when they are loaded.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterable

import torch
from _common import Options, digest
from torch import nn

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1024


def setup(options: Options, *, warn_only: bool = False) -> torch.device:
    """Seed and make deterministic; return the device, made current."""
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Deterministic mode else fills every new tensor with NaN, a pass over memory each.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(options.seed)
    return device


def generator(options: Options, step: int) -> torch.Generator:
    """Return the generator of a step's data, on the device."""
    result = torch.Generator(device=torch.device("cuda", options.device))
    return result.manual_seed(options.seed * 1_000_003 + step)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 sum over the bits, weighted by the row of 1,024 values they lie in.

    Integer sums have no rounding, so that their order does not matter.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_OF_SIZE[tensor.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    weights = 2 * torch.arange(rows.numel(), device=bits.device) + 3
    return (rows * weights).sum() + bits[whole:].sum(dtype=torch.int64)


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest over checksums computed on the device, one a tensor."""
    sums = [_sum(tensor) for tensor in tensors if tensor.is_cuda and tensor.numel()]
    return digest(torch.stack(sums).cpu().numpy())


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[torch.Tensor]:
    """Return parameters, buffers and the optimizer's tensors, in a fixed order."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for parameter in model.parameters():
            state = optimizer.state.get(parameter, {})
            tensors += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return tensors
