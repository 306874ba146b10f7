"""Move a wave packet by 2-D Fourier transforms of cuFFT, through PyTorch; numpy must agree."""

from __future__ import annotations

import _torch
import numpy as np
import torch
from _common import Report, guarded, parse, verify

DEFAULT_STEPS = 60
SMALL, BIG = 1024, 16384
TIME_STEP = 0.05


def packet(n: int, source: torch.Generator, device: torch.device) -> torch.Tensor:
    """Return an (n, n) Gaussian packet with noise on it, of norm 1."""
    axis = (torch.arange(n, device=device) - n / 2) / (n / 16)
    shape = torch.exp(-(axis[:, None] ** 2) - axis[None, :] ** 2)
    wave = torch.polar(shape, (2 * axis)[None, :].expand(n, n).contiguous())
    noise = torch.randn(n, n, 2, device=device, generator=source)
    wave = wave + 0.01 * torch.view_as_complex(noise)
    return wave / torch.linalg.vector_norm(wave)


def propagator(n: int, device: torch.device) -> torch.Tensor:
    """Return exp(-i k^2 dt / 2) on the grid of wave numbers, (n, n)."""
    k = torch.fft.fftfreq(n, 1 / 16, device=device) * (2 * torch.pi)
    phase = (k[:, None] ** 2 + k[None, :] ** 2) * (-TIME_STEP / 2)
    return torch.polar(torch.ones_like(phase), phase)


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    device = _torch.setup(options)
    n = BIG if options.big else SMALL
    wave = packet(n, _torch.generator(options, 0), device)
    factor = propagator(n, device)
    start = wave[:2].cpu().numpy().astype(np.complex128)
    lines = torch.fft.fft(wave[:2]).cpu().numpy()
    error = float(np.abs(np.fft.fft(start) - lines).max() / np.abs(lines).max())
    verify(error < 1e-5, f"the first transform differs from numpy.fft by {error:.1e}")
    for step in range(options.steps):
        wave = torch.fft.ifft2(torch.fft.fft2(wave) * factor)
        norm = float(torch.linalg.vector_norm(wave).item())
        verify(abs(norm - 1) < 1e-2, f"step {step}: the norm is {norm}, not 1")
        report.step(step, _torch.checksum([torch.view_as_real(wave), torch.view_as_real(factor)]))
    report.done()


if __name__ == "__main__":
    guarded(main)
