"""Data-parallel training by one JAX process: a part of each batch on each GPU, sums by psum."""

from __future__ import annotations

import itertools
import os

# XLA reads these when jax is imported. Without them it takes most of the GPU's memory at once,
# and chooses kernels by timing, which differs from run to run.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
).strip()
# Multicast memory cannot be saved.
os.environ["NCCL_NVLS_ENABLE"] = "0"

from typing import Any

import jax
import numpy as np
from _common import Options, Report, digest, guarded, options_of, parser, verify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from numpy.typing import NDArray

DEFAULT_STEPS, RANKS = 100, 2
ROWS = 128
"""Each GPU has so many of a batch."""
SIZES = (256, 1024, 1024, 256)
RATE, MOMENTUM = 0.05, 0.9

Layers = list[tuple[Any, Any]]


def initial(seed: int) -> Layers:
    rng = np.random.default_rng([seed, 14])
    result: Layers = []
    for inputs, outputs in itertools.pairwise(SIZES):
        values = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        result.append((values, np.zeros(outputs, np.float32)))
    return result


def batch(seed: int, step: int, ranks: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([seed, 15, step])
    return rng.normal(0, 1, (ROWS * ranks, SIZES[0])).astype(np.float32)


def loss_of(layers: Layers, x: Any) -> Any:
    """How far the network is from giving back what it is given."""
    y = x
    for weights, bias in layers[:-1]:
        y = jax.nn.relu(y @ weights + bias)
    weights, bias = layers[-1]
    return ((y @ weights + bias - x) ** 2).mean()


def reference_loss(layers: Layers, x: NDArray[np.float32]) -> float:
    y = x.astype(np.float64)
    for weights, bias in layers[:-1]:
        y = np.maximum(y @ weights + bias, 0)
    y = y @ layers[-1][0] + layers[-1][1]
    return float(((y - x) ** 2).mean())


def step_on(mesh: Mesh, ranks: int) -> Any:
    """Return the compiled step: each GPU takes its rows, all add up their gradients."""

    def step(layers: Layers, velocity: Layers, x: Any) -> tuple[Any, Any, Any]:
        loss, gradient = jax.value_and_grad(loss_of)(layers, x)
        loss, gradient = jax.lax.psum((loss / ranks, gradient), "ranks")
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g / ranks, velocity, gradient)
        layers = jax.tree.map(lambda p, v: p - RATE * v, layers, velocity)
        return layers, velocity, loss

    # Unchecked, gradients of what all GPUs have are those of each one's rows, not sums already.
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(Spec(), Spec(), Spec("ranks")),
            out_specs=(Spec(), Spec(), Spec()),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )


def state_of(trees: tuple[Layers, Layers]) -> str:
    """Return a digest of what each GPU has: all have the same. Raises VerifyError."""
    copies: dict[int, list[NDArray[Any]]] = {}
    for leaf in jax.tree.leaves(trees):
        for shard in leaf.addressable_shards:
            copies.setdefault(shard.device.id, []).append(np.ascontiguousarray(shard.data))
    found = {digest(*copy) for copy in copies.values()}
    verify(len(found) == 1, "the GPUs have different parameters")
    return found.pop()


def train(options: Options, ranks: int) -> None:
    report = Report(options)
    jax.config.update("jax_default_matmul_precision", "highest")
    devices = jax.devices("cuda")[:ranks]
    verify(len(devices) == ranks, f"there are {len(devices)} GPUs, not {ranks}")
    mesh = Mesh(np.array(devices), ("ranks",))
    everywhere, parts = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("ranks"))
    start = initial(options.seed)
    layers = jax.device_put(start, everywhere)
    velocity = jax.device_put([(np.zeros_like(w), np.zeros_like(b)) for w, b in start], everywhere)
    train_step = step_on(mesh, ranks)
    value = expected = 0.0
    for step in range(options.steps):
        x = batch(options.seed, step, ranks)
        layers, velocity, loss = train_step(layers, velocity, jax.device_put(x, parts))
        value = float(loss)
        if step == 0:
            expected = reference_loss(start, x)
            verify(
                abs(value - expected) <= 1e-3 * abs(expected),
                f"the first loss is {value} but numpy says {expected}",
            )
        report.step(step, state_of((layers, velocity)), loss=value)
    if options.steps >= DEFAULT_STEPS:
        verify(value < expected / 2, f"the loss only went from {expected} to {value}")
    report.done()


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--ranks", type=int, default=RANKS, help="GPUs to train on")
    arguments = options_parser.parse_args()
    train(options_of(arguments), arguments.ranks)


if __name__ == "__main__":
    guarded(main)
