"""Train a perceptron with jax.jit; numpy must agree on the first loss."""

from __future__ import annotations

import itertools
import os

# XLA reads these when jax is imported. Without them it takes most of the GPU's memory at once,
# and chooses kernels by timing, which differs from run to run.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
).strip()

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import Report, digest, guarded, parse, verify
from numpy.typing import NDArray

DEFAULT_STEPS = 100
BATCH = 256
SIZES = (256, 1024, 1024, 10)
RATE, MOMENTUM = 0.01, 0.9

Parameters = list[tuple[Any, Any]]


def initial(seed: int) -> Parameters:
    rng = np.random.default_rng([seed, 12])
    result: Parameters = []
    for inputs, outputs in itertools.pairwise(SIZES):
        weights = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        result.append((weights, np.zeros(outputs, np.float32)))
    return result


def batch(seed: int, step: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    rng = np.random.default_rng([seed, 13, step])
    x = rng.normal(0, 1, (BATCH, SIZES[0])).astype(np.float32)
    # A rule that can be learnt, so that training has something to do.
    return x, x[:, : SIZES[-1]].argmax(1).astype(np.int32)


def loss_of(parameters: Parameters, x: Any, y: Any) -> Any:
    for weights, bias in parameters[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    weights, bias = parameters[-1]
    logits = x @ weights + bias
    rows = jnp.arange(logits.shape[0])
    return -jax.nn.log_softmax(logits)[rows, y].mean()


def reference_loss(parameters: Parameters, x: NDArray[np.float32], y: NDArray[np.int32]) -> float:
    z = x.astype(np.float64)
    for weights, bias in parameters[:-1]:
        z = np.maximum(z @ weights + bias, 0)
    z = z @ parameters[-1][0] + parameters[-1][1]
    z -= z.max(1, keepdims=True)
    logs = z - np.log(np.exp(z).sum(1, keepdims=True))
    return float(-logs[np.arange(len(y)), y].mean())


@jax.jit
def train_step(parameters: Any, velocity: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
    loss, gradient = jax.value_and_grad(loss_of)(parameters, x, y)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    parameters = jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity)
    return parameters, velocity, loss


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    jax.config.update("jax_default_matmul_precision", "highest")
    device = jax.devices("cuda")[options.device]
    start = initial(options.seed)
    parameters = jax.device_put(start, device)
    velocity = jax.device_put([(np.zeros_like(w), np.zeros_like(b)) for w, b in start], device)
    value = expected = 0.0
    for step in range(options.steps):
        x, y = batch(options.seed, step)
        parameters, velocity, loss = train_step(
            parameters, velocity, jax.device_put(x, device), jax.device_put(y, device)
        )
        value = float(loss)
        if step == 0:
            expected = reference_loss(start, x, y)
            verify(
                abs(value - expected) <= 1e-3 * abs(expected),
                f"the first loss is {value} but numpy says {expected}",
            )
        leaves = jax.tree.leaves((parameters, velocity))
        state = digest(*(np.ascontiguousarray(leaf) for leaf in leaves))
        report.step(step, state, loss=value)
    if options.steps >= DEFAULT_STEPS:
        verify(value < expected / 2, f"the loss only went from {expected} to {value}")
    report.done()


if __name__ == "__main__":
    guarded(main)
