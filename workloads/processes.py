"""A launcher without CUDA and three GPU workers, started by fork and exec, joined by pipes."""

from __future__ import annotations

import subprocess
import sys
from typing import IO

import numpy as np
from _common import Report, digest, guarded, options_of, parser, verify
from numpy.typing import NDArray

DEFAULT_STEPS = 40
WORKERS = 3
WORDS = 2048
BIG_WORDS = 1 << 20
# What one worker hands to the next, in bytes.
MESSAGE = 64

SOURCE = r"""
extern "C" __global__ void absorb(unsigned* state, const unsigned* message, unsigned step,
                                  int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = mix32(state[i] + message[i % WORDS_IN_MESSAGE] * (2u * step + 1u) + i);
}
"""


def read_exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    verify(len(data) == size, f"a pipe closed after {len(data)} of {size} bytes")
    return data


def worker(number: int, device: int, seed: int, count: int) -> None:
    """Serve steps: read a message, change the state on the GPU, answer with message and digest."""
    from _cuda import MIX_SOURCE, Gpu, blocks, mix32

    gpu = Gpu(device)
    module = gpu.module(MIX_SOURCE + SOURCE, WORDS_IN_MESSAGE=MESSAGE // 4)
    absorb = module.kernel("absorb", "PPIi")
    expected: NDArray[np.uint32] = np.random.default_rng([seed, 7, number]).integers(
        0, 1 << 32, count, np.uint32
    )
    state, message = gpu.upload(expected), gpu.alloc(MESSAGE)
    positions = np.arange(count, dtype=np.uint32)
    step = 0
    while data := sys.stdin.buffer.read(MESSAGE):
        before = gpu.digest()
        words = np.frombuffer(data, np.uint32)
        gpu.write(message, words)
        absorb(blocks(count), 256, state, message, step, count)
        found = gpu.read(state, np.uint32, count)
        factor = np.uint32(2 * step + 1)
        expected = mix32(expected + words[positions % (MESSAGE // 4)] * factor + positions)
        verify(np.array_equal(found, expected), f"worker {number}: step {step} went wrong")
        whole = digest(before.encode(), gpu.digest().encode())
        sys.stdout.buffer.write(found[: MESSAGE // 4].tobytes() + whole.encode())
        sys.stdout.buffer.flush()
        step += 1
    gpu.close()


class Worker:
    def __init__(self, number: int, device: int, seed: int, count: int) -> None:
        command = [sys.executable, __file__, "--worker", str(number), "--words", str(count)]
        command += ["--device", str(device), "--seed", str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, message: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(message)
        self.process.stdin.flush()

    def receive(self) -> tuple[bytes, bytes]:
        """Return the worker's message for its neighbour and its digest."""
        assert self.process.stdout is not None
        data = read_exactly(self.process.stdout, MESSAGE + 32)
        return data[:MESSAGE], data[MESSAGE:]

    def finish(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--worker", type=int, help="serve as this worker")
    options_parser.add_argument("--words", type=int, default=WORDS, help="words of one worker")
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    if arguments.worker is not None:
        worker(arguments.worker, options.device, options.seed, arguments.words)
        return
    report = Report(options)
    count = BIG_WORDS if options.big else arguments.words
    workers = [Worker(n, options.device, options.seed, count) for n in range(WORKERS)]
    messages = [bytes([n]) * MESSAGE for n in range(WORKERS)]
    for step in range(options.steps):
        for one, message in zip(workers, messages, strict=True):
            one.send(message)
        answers = [one.receive() for one in workers]
        # A ring: what one worker says is what the next one hears.
        messages = [answers[n - 1][0] for n in range(WORKERS)]
        report.step(step, digest(*(part for answer in answers for part in answer)))
    codes = [one.finish() for one in workers]
    verify(codes == [0] * WORKERS, f"the workers ended with {codes}")
    report.done()


if __name__ == "__main__":
    guarded(main)
