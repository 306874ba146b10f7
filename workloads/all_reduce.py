"""A server and its worker that add up each other's memory in kernels, as vLLM's custom all-reduce.

Each kernel waits for the other process's: flags in memory that was opened by legacy IPC say how far
each is. Nobody else waits, so one may be a kernel ahead of the other at any moment.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from typing import Any

import numpy as np
from _common import Options, Report, guarded, options_of, parser, verify
from _cuda import MIX_SOURCE, Gpu, check, mix32, pattern_of
from cuda.bindings import driver

DEFAULT_STEPS = 40
ROUNDS = 4  # of a step, which ends with a look at the result
THREADS = 64
PACKET = 1 << 12

SOURCE = (
    MIX_SOURCE
    + r"""
// `mine` and `theirs` have a word in front, which says how many rounds their owner has begun and
// ended, in turn. The other's data may change only when both have been read.
__device__ void meet(volatile unsigned* mine, volatile unsigned* theirs, unsigned count)
{
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *mine = count;
        while (*theirs < count)
            ;
        __threadfence_system();
    }
    __syncthreads();
}

extern "C" __global__ void all_reduce(unsigned* mine, unsigned* theirs, unsigned round, int count)
{
    volatile unsigned* own = mine + FRONT;
    volatile unsigned* others = theirs + FRONT;
    meet(mine, theirs, 2 * round + 1);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        mine[FRONT + count + i] = own[i] + others[i];
    meet(mine, theirs, 2 * round + 2);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        mine[FRONT + i] = mix32(mine[FRONT + count + i] + round + RANK);
}
"""
)
FRONT = 64


class Rank:
    def __init__(self, number: int, options: Options, words: int) -> None:
        self.words, self.round = words, 0
        self.gpu = Gpu(options.device)
        module = self.gpu.module(SOURCE, FRONT=FRONT, RANK=number)
        self.kernel = module.kernel("all_reduce", "PPIi")
        self.mine = self.gpu.alloc(4 * (FRONT + 2 * words))
        start = pattern_of(options.seed * 10 + number, 4 * words)
        self.gpu.write(self.mine + 4 * FRONT, start)
        self.gpu.synchronize()
        self.theirs = 0

    def handle(self) -> str:
        return base64.b64encode(bytes(check(driver.cuIpcGetMemHandle(self.mine)).reserved)).decode()

    def open(self, text: str) -> None:
        handle = driver.CUipcMemHandle()
        handle.reserved = base64.b64decode(text)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.theirs = int(check(driver.cuIpcOpenMemHandle(handle, flags)))

    def step(self) -> Any:
        """The sums of the last round."""
        for _ in range(ROUNDS):
            self.kernel(1, THREADS, self.mine, self.theirs, self.round, self.words)
            self.round += 1
        sums = self.mine + 4 * (FRONT + self.words)
        return self.gpu.read(sums, np.uint32, self.words)


def work(options: Options, words: int, peer: socket.socket) -> None:
    rank = Rank(1, options, words)
    peer.send(rank.handle().encode())
    rank.open(peer.recv(PACKET).decode())
    while peer.recv(PACKET):
        sums = rank.step()
        peer.send(json.dumps([int(word) for word in sums[:8]]).encode())


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--peer", type=int, help="be the worker, on this descriptor")
    options_parser.add_argument("--words", type=int, default=256, help="words of a rank")
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    words = 1 << 14 if options.big else arguments.words
    if arguments.peer is not None:
        with socket.socket(fileno=arguments.peer) as peer:
            work(options, words, peer)
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, "--peer", str(theirs.fileno()), "--words", str(words)]
    command += ["--device", str(options.device), "--seed", str(options.seed)]
    worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    report = Report(options)
    rank = Rank(0, options, words)
    rank.open(ours.recv(PACKET).decode())
    ours.send(rank.handle().encode())
    first, second = (
        pattern_of(options.seed * 10 + number, 4 * words).view(np.uint32) for number in range(2)
    )
    for step in range(options.steps):
        ours.send(b"step")
        sums = rank.step()
        for number in range(step * ROUNDS, (step + 1) * ROUNDS):
            expected = first + second
            first, second = (mix32(expected + np.uint32(number + one)) for one in range(2))
        verify(np.array_equal(sums, expected), f"step {step}: the sums are wrong")
        said = json.loads(ours.recv(PACKET))
        verify(said == [int(word) for word in expected[:8]], f"step {step}: the worker's are wrong")
        report.step(step, rank.gpu.digest())
    ours.close()
    verify(worker.wait() == 0, "the worker has failed")
    report.done()


if __name__ == "__main__":
    guarded(main)
