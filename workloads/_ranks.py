"""What programs of several ranks share: torchrun, which starts one on each GPU, and their sums."""

from __future__ import annotations

import argparse
import os
import sys

# Multicast memory cannot be saved. NCCL and PyTorch read these when they make communicators.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

from collections.abc import Callable, Iterable

import _common
import _torch
import torch
import torch.distributed as dist
from _common import Options, digest, options_of

RANKS = 2


def parser(description: str, *, steps: int) -> argparse.ArgumentParser:
    """Return the common option parser with the number of ranks."""
    result = _common.parser(description, steps=steps)
    result.add_argument("--ranks", type=int, default=RANKS, help="ranks, one on each GPU")
    return result


def launch(ranks: int) -> None:
    """Become torchrun, which starts the ranks and watches them."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *words, *sys.argv])


def run(arguments: argparse.Namespace, work: Callable[[Options, int, int], None]) -> None:
    """Have each rank do the work: it gets its options, its rank and the number of ranks."""
    if "RANK" not in os.environ:
        launch(arguments.ranks)
    device = int(os.environ["LOCAL_RANK"])
    options = Options(**{**vars(options_of(arguments)), "device": device})
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    work(options, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def checksum(options: Options, tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest over the tensors of all ranks. Each rank must ask for it."""
    own = torch.tensor(
        list(bytes.fromhex(_torch.checksum(tensors))),
        dtype=torch.uint8,
        device=torch.device("cuda", options.device),
    )
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return digest(torch.cat(found).cpu().numpy())
