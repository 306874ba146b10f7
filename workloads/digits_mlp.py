"""Train a 64-64-10 perceptron on scikit-learn's digits with kernels of our own."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import IO

import _saving
import numpy as np
from _common import Options, Report, digest, guarded, options_of, parser, verify
from _cuda import Gpu, blocks
from numpy.typing import NDArray

DEFAULT_STEPS = 200
CHECKED_STEPS = 8
PIXELS, HIDDEN, CLASSES = 64, 64, 10
RATE, MOMENTUM = 0.1, 0.9
TILE = 16
# Offsets, in floats, of the parameters inside one buffer.
W1 = 0
B1 = W1 + PIXELS * HIDDEN
W2 = B1 + HIDDEN
B2 = W2 + HIDDEN * CLASSES
COUNT = B2 + CLASSES

SOURCE = r"""
extern "C" __global__ void gather(const float* images, const int* labels, const int* picks,
                                  float* x, int* y, int rows)
{
    int row = blockIdx.x;
    if (row < rows) {
        x[row * PIXELS + threadIdx.x] = images[picks[row] * PIXELS + threadIdx.x];
        if (threadIdx.x == 0)
            y[row] = labels[picks[row]];
    }
}

// c[m][n] = a[m][k] * b[k][n]; the strides let either factor be read as its transpose.
extern "C" __global__ void matmul(const float* a, int a_row, int a_col, const float* b, int b_row,
                                  int b_col, float* c, int m, int n, int k)
{
    __shared__ float left[TILE][TILE], right[TILE][TILE + 1];
    int tx = threadIdx.x, ty = threadIdx.y;
    int row = blockIdx.y * TILE + ty, col = blockIdx.x * TILE + tx;
    float sum = 0.0f;
    for (int base = 0; base < k; base += TILE) {
        int p = base + tx, q = base + ty;
        left[ty][tx] = row < m && p < k ? a[row * a_row + p * a_col] : 0.0f;
        right[ty][tx] = q < k && col < n ? b[q * b_row + col * b_col] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i)
            sum += left[ty][i] * right[i][tx];
        __syncthreads();
    }
    if (row < m && col < n)
        c[row * n + col] = sum;
}

extern "C" __global__ void add_bias(float* x, const float* bias, int rows, int cols, int relu)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * cols) {
        float v = x[i] + bias[i % cols];
        x[i] = relu && v < 0.0f ? 0.0f : v;
    }
}

// logits become the gradient of the mean cross entropy; losses[row] is the row's own.
extern "C" __global__ void softmax_loss(float* logits, const int* labels, float* losses, int rows)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    float* z = logits + row * CLASSES;
    float top = z[0], sum = 0.0f;
    for (int i = 1; i < CLASSES; ++i)
        top = fmaxf(top, z[i]);
    for (int i = 0; i < CLASSES; ++i)
        sum += expf(z[i] - top);
    int label = labels[row];
    losses[row] = logf(sum) - (z[label] - top);
    for (int i = 0; i < CLASSES; ++i)
        z[i] = (expf(z[i] - top) / sum - (i == label ? 1.0f : 0.0f)) / (float)rows;
}

extern "C" __global__ void mean(const float* values, float* result, int count)
{
    __shared__ float partial[256];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += 256)
        sum += values[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int width = 128; width > 0; width >>= 1) {
        if (threadIdx.x < width)
            partial[threadIdx.x] += partial[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *result = partial[0] / (float)count;
}

extern "C" __global__ void relu_backward(float* gradient, const float* activation, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && activation[i] <= 0.0f)
        gradient[i] = 0.0f;
}

extern "C" __global__ void column_sums(const float* x, float* sums, int rows, int cols)
{
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    float sum = 0.0f;
    for (int row = 0; row < rows; ++row)
        sum += x[row * cols + col];
    sums[col] = sum;
}

extern "C" __global__ void update(float* weights, float* velocity, const float* gradient,
                                  float rate, float momentum, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        velocity[i] = momentum * velocity[i] + gradient[i];
        weights[i] -= rate * velocity[i];
    }
}
"""


def load_digits() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return images (1797, 64) in 0..1 and labels, without the cost of importing sklearn."""
    spec = importlib.util.find_spec("sklearn")
    verify(
        spec is not None and bool(spec.submodule_search_locations),
        "scikit-learn is not installed: its digits are the data set of this program",
    )
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return np.ascontiguousarray(table[:, :-1] / 16), table[:, -1].astype(np.int32)


def initial_weights(seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([seed, 1])
    weights = np.zeros(COUNT, np.float32)
    weights[W1:B1] = rng.normal(0, np.sqrt(2 / PIXELS), B1 - W1)
    weights[W2:B2] = rng.normal(0, np.sqrt(1 / HIDDEN), B2 - W2)
    return weights


def picks_of(seed: int, step: int, batch: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng([seed, 2, step]).integers(0, count, batch, np.int32)


class Reference:
    """Does the same training in numpy, with double precision."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self.weights = weights.astype(np.float64)
        self.velocity = np.zeros(COUNT)

    def logits(self, x: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        w1 = self.weights[W1:B1].reshape(PIXELS, HIDDEN)
        hidden = np.maximum(x @ w1 + self.weights[B1:W2], 0)
        w2 = self.weights[W2:B2].reshape(HIDDEN, CLASSES)
        return hidden, hidden @ w2 + self.weights[B2:]

    def step(self, x: NDArray[np.float32], y: NDArray[np.int32]) -> float:
        hidden, z = self.logits(x)
        rows = np.arange(len(y))
        z -= z.max(1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        loss = float(-np.log(p[rows, y]).mean())
        p[rows, y] -= 1
        p /= len(y)
        back = (p @ self.weights[W2:B2].reshape(HIDDEN, CLASSES).T) * (hidden > 0)
        gradient = np.concatenate(
            [(x.T @ back).ravel(), back.sum(0), (hidden.T @ p).ravel(), p.sum(0)]
        )
        self.velocity = MOMENTUM * self.velocity + gradient
        self.weights -= RATE * self.velocity
        return loss


class Trainer:
    """All device state of the training: data set, parameters, momentum, work buffers."""

    def __init__(self, gpu: Gpu, options: Options, batch: int) -> None:
        self.gpu, self.batch = gpu, batch
        module = gpu.module(SOURCE, PIXELS=PIXELS, CLASSES=CLASSES, TILE=TILE)
        self.gather = module.kernel("gather", "PPPPPi")
        self.matmul = module.kernel("matmul", "PiiPiiPiii")
        self.add_bias = module.kernel("add_bias", "PPiii")
        self.softmax_loss = module.kernel("softmax_loss", "PPPi")
        self.mean = module.kernel("mean", "PPi")
        self.relu_backward = module.kernel("relu_backward", "PPi")
        self.column_sums = module.kernel("column_sums", "PPii")
        self.update = module.kernel("update", "PPPffi")

        self.images_host, self.labels_host = load_digits()
        self.images = gpu.upload(self.images_host)
        self.labels = gpu.upload(self.labels_host)
        self.weights = gpu.upload(initial_weights(options.seed))
        self.velocity = gpu.upload(np.zeros(COUNT, np.float32))
        self.gradient = gpu.alloc(4 * COUNT)
        self.picks = gpu.alloc(4 * batch)
        self.x = gpu.alloc(4 * batch * PIXELS)
        self.y = gpu.alloc(4 * batch)
        self.hidden = gpu.alloc(4 * batch * HIDDEN)
        self.logits = gpu.alloc(4 * batch * CLASSES)
        self.hidden_gradient = gpu.alloc(4 * batch * HIDDEN)
        self.losses = gpu.alloc(4 * batch)
        self.loss = gpu.alloc(4)

    def multiply(
        self,
        a: tuple[int, int, int],
        b: tuple[int, int, int],
        c: int,
        shape: tuple[int, int, int],
    ) -> None:
        m, n, k = shape
        grid = (blocks(n, TILE), blocks(m, TILE), 1)
        self.matmul(grid, (TILE, TILE, 1), *a, *b, c, m, n, k)

    def forward(self, picks: NDArray[np.int32]) -> None:
        n = self.batch
        self.gpu.write(self.picks, picks)
        self.gather(n, PIXELS, self.images, self.labels, self.picks, self.x, self.y, n)
        w1, w2 = self.weights + 4 * W1, self.weights + 4 * W2
        self.multiply((self.x, PIXELS, 1), (w1, HIDDEN, 1), self.hidden, (n, HIDDEN, PIXELS))
        self.add_bias(blocks(n * HIDDEN), 256, self.hidden, self.weights + 4 * B1, n, HIDDEN, 1)
        self.multiply((self.hidden, HIDDEN, 1), (w2, CLASSES, 1), self.logits, (n, CLASSES, HIDDEN))
        self.add_bias(blocks(n * CLASSES), 256, self.logits, self.weights + 4 * B2, n, CLASSES, 0)

    def step(self, picks: NDArray[np.int32]) -> float:
        n, g = self.batch, self.gradient
        self.forward(picks)
        self.softmax_loss(blocks(n, 64), 64, self.logits, self.y, self.losses, n)
        self.mean(1, 256, self.losses, self.loss, n)
        back = self.hidden_gradient
        self.multiply(
            (self.logits, CLASSES, 1),
            (self.weights + 4 * W2, 1, CLASSES),
            back,
            (n, HIDDEN, CLASSES),
        )
        self.relu_backward(blocks(n * HIDDEN), 256, back, self.hidden, n * HIDDEN)
        self.multiply((self.x, 1, PIXELS), (back, HIDDEN, 1), g + 4 * W1, (PIXELS, HIDDEN, n))
        self.column_sums(1, HIDDEN, back, g + 4 * B1, n, HIDDEN)
        self.multiply(
            (self.hidden, 1, HIDDEN), (self.logits, CLASSES, 1), g + 4 * W2, (HIDDEN, CLASSES, n)
        )
        self.column_sums(1, 32, self.logits, g + 4 * B2, n, CLASSES)
        self.update(blocks(COUNT), 256, self.weights, self.velocity, g, RATE, MOMENTUM, COUNT)
        return float(self.gpu.read(self.loss, np.float32, 1)[0])

    def accuracy(self) -> float:
        """Return the share of the whole data set that the trained network gets right."""
        right, count = 0, len(self.labels_host)
        for begin in range(0, count, self.batch):
            picks = np.minimum(np.arange(begin, begin + self.batch), count - 1).astype(np.int32)
            self.forward(picks)
            logits = self.gpu.read(self.logits, np.float32, (self.batch, CLASSES))
            real = min(self.batch, count - begin)
            right += int((logits.argmax(1) == self.labels_host[picks])[:real].sum())
        return right / count


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    _saving.add_options(options_parser)
    arguments = options_parser.parse_args()
    options, saver = options_of(arguments), _saving.Saver(arguments)
    report = Report(options)
    gpu = Gpu(options.device)
    trainer = Trainer(gpu, options, batch=1024 if options.big else 64)
    reference = Reference(initial_weights(options.seed))
    count = len(trainer.labels_host)

    def load(path: Path) -> int:
        with np.load(path) as saved:
            gpu.put_contents([saved[f"memory{n}"] for n in range(len(saved) - 1)])
            return int(saved["step"])

    for step in range(saver.load(load), options.steps):
        before = gpu.digest()
        picks = picks_of(options.seed, step, trainer.batch, count)
        loss = trainer.step(picks)
        if step < CHECKED_STEPS:
            expected = reference.step(trainer.images_host[picks], trainer.labels_host[picks])
            verify(
                abs(loss - expected) <= 1e-3 * abs(expected),
                f"step {step}: loss {loss} but numpy says {expected}",
            )
        report.step(step, digest(before.encode(), gpu.digest().encode()), loss=loss)
        saver.end_of_step(step, lambda file, step=step: save(file, gpu, step))
    if options.steps >= DEFAULT_STEPS:
        accuracy = trainer.accuracy()
        verify(accuracy > 0.95, f"only {accuracy:.1%} of the training set right at the end")
    gpu.close()
    report.done()


def save(file: IO[bytes], gpu: Gpu, step: int) -> None:
    memory = {f"memory{n}": data for n, data in enumerate(gpu.contents())}
    np.savez(file, step=step, **memory)


if __name__ == "__main__":
    guarded(main)
