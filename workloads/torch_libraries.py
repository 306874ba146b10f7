"""Call one of NVIDIA's libraries a step, through PyTorch, each again and again.

cuBLASLt, cuDNN, cuFFT, cuSOLVER and cuSPARSE keep handles, plans and workspaces from
one call to the next. A step's result goes into the input of all that follow.
"""

from __future__ import annotations

from collections.abc import Callable

import _torch
import torch
from _common import Report, guarded, parse, verify
from torch import Tensor, nn

DEFAULT_STEPS = 200
SIZE = 192
TOLERANCE = 0.02  # against the processor; half precision
Library = Callable[[Tensor], Tensor]


def well_conditioned(x: Tensor) -> Tensor:
    return x @ x.T / SIZE + torch.eye(SIZE, device=x.device)


def linear(x: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.linear(x.bfloat16(), x.bfloat16(), x[0].bfloat16()))


def convolution(x: Tensor) -> Tensor:
    return nn.functional.conv2d(x.view(1, 3, -1, SIZE), x[:8, :27].reshape(8, 3, 3, 3), padding=1)


def fourier(x: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x) * 0.5) + torch.fft.fft(x.flatten()).abs().view_as(x)


def solve(x: Tensor) -> Tensor:
    return torch.linalg.solve(well_conditioned(x), x)


def factorize(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(well_conditioned(x))


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x)


def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(well_conditioned(x))


def sparse(x: Tensor) -> Tensor:
    # cuSPARSE adds in any order, and sums of small integers are exact in each.
    return (x > 1).float().to_sparse_csr() @ (16 * x).round()


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 3, -1, SIZE).bfloat16()
    return nn.functional.scaled_dot_product_attention(q, q, q)


def sort(x: Tensor) -> Tensor:
    return torch.sort(x.flatten()).values.diff().cumsum(0)


LIBRARIES: tuple[Library, ...] = (
    linear,
    convolution,
    fourier,
    solve,
    factorize,
    singular_values,
    eigenvalues,
    sparse,
    attention,
    sort,
)


def is_near(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.cpu().double(), expected.double()
    return float((found - expected).norm() / expected.norm()) <= TOLERANCE


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    device = _torch.setup(options, warn_only=True)
    x = torch.randn(SIZE, SIZE, device=device)
    for step in range(options.steps):
        library = LIBRARIES[step % len(LIBRARIES)]
        found = library(x)
        if step < len(LIBRARIES):
            name = library.__name__
            verify(is_near(found, library(x.cpu())), f"{name} is not near the processor's result")
        x[step % SIZE] += found.float().mean()
        x = x + 1e-3 * torch.randn_like(x)
        x = nn.functional.layer_norm(x, x.shape)
        report.step(step, _torch.checksum([x, found.float()]))
    report.done()


if __name__ == "__main__":
    guarded(main)
