"""Trains real TensorFlow models under the memory stub and prints, after each step, one line of
JSON: what the BFC allocator says that it has given out, and what the live set says.

TF_CPU_ALLOCATOR_USE_BFC=true gives the host the allocator that GPUs have.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.active import look_at
from coordinator.live_set import LiveSet

DEVICE = "CPU:0"
Step = Callable[[int], Any]


def dense(random: np.random.Generator) -> Step:
    """A compiled training step of a small classifier, each time with another batch size."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(n, "relu") for n in (256, 128, 10)])
    optimizer = tf.keras.optimizers.Adam(0.01)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.build((None, 64))
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    def step(index: int) -> Any:
        rows = 16 + 7 * index
        x = tf.constant(random.normal(size=(rows, 64)), tf.float32)
        y = tf.constant(random.integers(0, 10, rows), tf.int32)
        return train(x, y)

    return step


def convolution(random: np.random.Generator) -> Step:
    """Eager steps of a convolutional network; one result in three is kept."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    kept: list[Any] = []

    def step(index: int) -> Any:
        x = tf.constant(random.normal(size=(8, 28, 28, 1)), tf.float32)
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(model(x, training=True) ** 2)
        for variable, slope in zip(
            model.trainable_variables,
            tape.gradient(value, model.trainable_variables),
            strict=True,
        ):
            variable.assign_sub(0.01 * slope)
        if index % 3 == 0:
            kept.append(tf.identity(x))
        if index % 7 == 6:
            kept.clear()
        return value

    return step


def recurrent(random: np.random.Generator) -> Step:
    """Training by Keras' own loop, with its input pipeline and threads."""
    model = tf.keras.Sequential([tf.keras.layers.LSTM(32), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def step(index: int) -> Any:
        x = random.normal(size=(32, 5 + index % 4, 16)).astype(np.float32)
        history = model.fit(x, x[:, 0, :1], batch_size=8, verbose=0)
        return history.history["loss"][0]

    return step


def same_at_last(live: LiveSet) -> tuple[int, int]:
    """(BFC's bytes, ours), once both are the same: executors let go of tensors behind a step."""
    deadline = time.monotonic() + 2.0
    while True:
        ours = live.live_bytes()
        theirs = int(tf.config.experimental.get_memory_info(DEVICE)["current"])
        if ours == theirs or time.monotonic() > deadline:
            return theirs, ours
        time.sleep(0.001)


def steps() -> Iterator[tuple[str, int]]:
    for make in (dense, convolution, recurrent):
        step = make(np.random.default_rng(7))
        for index in range(12):
            value = float(step(index))
            assert np.isfinite(value), f"{make.__name__} gives {value}"
            yield make.__name__, index
        del step


def main() -> None:
    # The intercept library does so at its HELLO.
    live = LiveSet(os.dup(ctypes.CDLL(None).flowgpu_memstub_fd()))
    for name, index in steps():
        theirs, ours = same_at_last(live)
        blocks = look_at(live, np.zeros((0, 3), np.uint64)).blocks
        report = {
            "model": name,
            "step": index,
            "bfc": theirs,
            "stub": ours,
            "blocks": int(blocks[:, 1].sum()),
            "overflow": live.overflow(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
