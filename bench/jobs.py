"""The jobs that are measured: their workloads, sizes, how often, and about how long a run takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from flowgpu.launch import GpuKind

MANY_STEPS = 2000  # more than any measured job gets to
BIG = ("--scale", "big")
DEFAULT_REPEATS = 3


@dataclass(frozen=True)
class About:
    """What bench knows of a workload; seconds are of one run on an H200, all in."""

    options: tuple[str, ...] = ()
    repeats: int = DEFAULT_REPEATS
    flowgpu: float = 30.0
    peer: float = 45.0
    peer_torch_save: float = 0.0  # 0: it does not save itself


KNOWN = {
    "gpt2": About(flowgpu=25, peer=40, peer_torch_save=35),
    "gpt2_xl": About(repeats=2, flowgpu=55, peer=130, peer_torch_save=110),
    "resnet50": About(flowgpu=30, peer=45, peer_torch_save=40),
    "torch_compile": About(("--step-delay", "0.02"), flowgpu=40, peer=60),
    "resnet50_infer": About(BIG),
    "vit_l16": About(BIG, repeats=2, flowgpu=35, peer=70, peer_torch_save=45),
    "bert_large": About(BIG, repeats=2, flowgpu=35, peer=70, peer_torch_save=45),
    "qwen2_train": About(BIG, repeats=2, flowgpu=45, peer=110, peer_torch_save=90),
    "opt_train": About(BIG, repeats=2, flowgpu=45, peer=110, peer_torch_save=90),
    "lora": About(BIG, flowgpu=35, peer=60, peer_torch_save=40),
    "fft2d_cufft": About(BIG),
    # Steps of a few milliseconds: they would be through before they are dumped.
    "nbody": About((*BIG, "--step-delay", "0.02"), flowgpu=20, peer=25),
    "lennard_jones": About((*BIG, "--step-delay", "0.02"), flowgpu=20, peer=25),
    "openmm_water": About(BIG, flowgpu=20, peer=25),
    "digits_mlp": About(("--step-delay", "0.02"), flowgpu=20, peer=20, peer_torch_save=20),
}
JOBS: dict[GpuKind, str] = {
    "nvidia": ",".join(name for name in KNOWN if name != "digits_mlp"),
    "emulated": "digits_mlp",
}


@dataclass(frozen=True)
class Measured:
    """A job that is checkpointed: a workload, its further options, and how often."""

    workload: str
    repeats: int
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        words = [sys.executable, f"workloads/{self.workload}.py", "--steps", str(MANY_STEPS)]
        return [*words, *self.options]

    @property
    def about(self) -> About:
        return KNOWN.get(self.workload, About())


def measured(names: str, repeats: int | None) -> list[Measured]:
    """The jobs of `a,b`; `repeats` replaces each one's own."""
    found = []
    for name in names.split(","):
        about = KNOWN.get(name, About())
        found.append(Measured(name, repeats or about.repeats, about.options))
    return found
