"""Processes that have memory of one another: shareable handles and legacy IPC, as NCCL and PyTorch
use them.

Every rank maps a block of every other, and opens an allocation and an event of it. Its kernels
write to both after those of the others, for whose events its stream waits. One owner lets go of its
block, and a guest has ended by then: what others have of them stays.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
from _common import Report, digest, guarded, options_of, parser, verify
from _cuda import MIX_SOURCE, Gpu, blocks, check, pattern_of
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
RANKS, GUEST = 3, 3  # the guest has no steps
GRANULE = 2 << 20
LEGACY_WORDS = 3000  # so small that the allocation is not alone in its block
PACKET = 1 << 16

SOURCE = (
    MIX_SOURCE
    + r"""
extern "C" __global__ void stir(unsigned* words, const unsigned* others, int count, int period,
                                unsigned step)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        words[i] = mix32(words[i] + others[i % period] + step);
}
"""
)
Shared = tuple[int, list[str]]
KIND = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Rank:
    """What one process has, and has of others."""

    def __init__(self, number: int, device: int, seed: int, words: int) -> None:
        self.number, self.device, self.words = number, device, words
        identity = seed * 1000 + number
        self.size = -(-4 * words // GRANULE) * GRANULE
        self.gpu = Gpu(device)
        self.stir = self.gpu.module(SOURCE).kernel("stir", "PPiiI")
        self.legacy = self.gpu.upload(pattern_of(identity + 100, 4 * LEGACY_WORDS))
        self.handle: Any = self.create()
        self.own = self.map(self.handle)
        self.gpu.write(self.own, pattern_of(identity, 4 * words))
        self.blocks: dict[int, int] = {}  # by owner: where it is mapped
        self.opened: dict[int, int] = {}
        kinds = driver.CUevent_flags
        flags = kinds.CU_EVENT_DISABLE_TIMING.value | kinds.CU_EVENT_INTERPROCESS.value
        self.event = check(driver.cuEventCreate(flags))
        self.events: list[Any] = []  # of the others
        self.twin = 0  # the first of them, imported and mapped once more
        self.ticket = -1

    def create(self) -> Any:
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.device
        wanted.requestedHandleTypes = KIND
        return check(driver.cuMemCreate(self.size, wanted, 0))

    def map(self, handle: Any) -> int:
        address = int(check(driver.cuMemAddressReserve(self.size, 0, 0, 0)))
        check(driver.cuMemMap(address, self.size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(address, self.size, [access], 1))
        return address

    def unmap(self, address: int) -> None:
        check(driver.cuMemUnmap(address, self.size))
        check(driver.cuMemAddressFree(address, self.size))

    def share(self) -> Shared:
        """A descriptor of the block, the caller's to close, and handles of allocation and event."""
        fd = int(check(driver.cuMemExportToShareableHandle(self.handle, KIND, 0)))
        memory = check(driver.cuIpcGetMemHandle(self.legacy))
        event = check(driver.cuIpcGetEventHandle(self.event))
        texts = [base64.b64encode(bytes(one.reserved)).decode() for one in (memory, event)]
        return fd, texts

    def take(self, shared: dict[int, Shared]) -> None:
        """What the others have shared; the descriptors stay the caller's."""
        for owner, (fd, texts) in shared.items():
            self.blocks[owner] = self.import_block(fd)
            memory, event = driver.CUipcMemHandle(), driver.CUipcEventHandle()
            memory.reserved, event.reserved = map(base64.b64decode, texts)
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            self.opened[owner] = int(check(driver.cuIpcOpenMemHandle(memory, flags)))
            self.events.append(check(driver.cuIpcOpenEventHandle(event)))
        self.ticket = os.dup(shared[min(shared)][0])
        self.twin = self.import_block(self.ticket)

    def import_block(self, fd: int) -> int:
        handle = check(driver.cuMemImportFromShareableHandle(fd, KIND))
        address = self.map(handle)
        check(driver.cuMemRelease(handle))  # the mapping keeps the memory
        return address

    def let_go(self) -> None:
        """The others go on with the block."""
        self.unmap(self.own)
        check(driver.cuMemRelease(self.handle))
        self.own = 0

    def step(self, number: int) -> None:
        """Write to what the others have, once they have done so."""
        if number % 5 == self.number:
            self.unmap(self.twin)
            self.twin = self.import_block(self.ticket)
        for event in self.events:
            check(driver.cuStreamWaitEvent(0, event, 0))
        for owner, at in sorted(self.blocks.items()):
            source = self.opened.get(owner, self.legacy)
            self.stir(blocks(self.words), 256, at, source, self.words, LEGACY_WORDS, number)
        for _, at in sorted(self.opened.items()):
            self.stir(blocks(LEGACY_WORDS), 256, at, self.twin, LEGACY_WORDS, self.words, number)
        check(driver.cuEventRecord(self.event, 0))

    def digests(self) -> list[tuple[str, str]]:
        """Digests of all memory that this rank can see, by name."""
        self.gpu.synchronize()
        for event in self.events:
            check(driver.cuEventSynchronize(event))
        found = [(f"block {owner}", self.look(at)) for owner, at in self.blocks.items()]
        found += [(f"block {min(self.blocks)}", self.look(self.twin))]
        found += [(f"block {self.number}", self.look(self.own))] if self.own else []
        legacy = {self.number: self.legacy, **self.opened}
        for owner, at in legacy.items():
            found.append((f"legacy {owner}", digest(self.gpu.read(at, np.uint32, LEGACY_WORDS))))
        return found

    def look(self, address: int) -> str:
        data: NDArray[np.uint32] = self.gpu.read(address, np.uint32, self.words)
        return digest(data)


def serve(rank: Rank, peer: socket.socket) -> None:
    """Answer the launcher until it closes its end."""
    while True:
        data, fds, _, _ = socket.recv_fds(peer, PACKET, GUEST + 1)
        if not data:
            return
        what, *words = json.loads(data)
        answer: Any = None
        if what == "share":
            fd, answer = rank.share()
            fds = [fd]
        elif what == "take":
            rank.take(dict(zip(words[0], zip(fds, words[1], strict=True), strict=True)))
        elif what == "step":
            rank.step(words[0])
        elif what == "digests":
            answer = rank.digests()
        else:
            rank.let_go()
        socket.send_fds(peer, [json.dumps(answer).encode()], fds if what == "share" else [])
        for fd in fds:
            os.close(fd)


class Process:
    """A rank in a process of its own."""

    def __init__(self, number: int, device: int, seed: int, words: int) -> None:
        self.peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, "--rank", str(number), "--words", str(words)]
        command += ["--device", str(device), "--seed", str(seed), "--peer", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, *words: Any, fds: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
        socket.send_fds(self.peer, [json.dumps(words).encode()], fds)
        data, found, _, _ = socket.recv_fds(self.peer, PACKET, 1)
        verify(bool(data), "a rank has ended")
        return json.loads(data), found

    def share(self) -> Shared:
        texts, fds = self.ask("share")
        return fds[0], texts

    def take(self, shared: dict[int, Shared]) -> None:
        fds, texts = zip(*shared.values(), strict=True)
        self.ask("take", list(shared), texts, fds=fds)

    def let_go(self) -> None:
        self.ask("let go")

    def step(self, number: int) -> None:
        self.ask("step", number)

    def digests(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.ask("digests")[0]]

    def end(self) -> None:
        self.peer.close()
        verify(self.process.wait() == 0, "a rank has failed")


def exchange(ranks: list[Rank | Process], guest: Process) -> None:
    shared = {number: one.share() for number, one in enumerate([*ranks, guest])}
    for number, one in enumerate(ranks):
        one.take({owner: each for owner, each in shared.items() if owner != number})
    for fd, _ in shared.values():
        os.close(fd)
    guest.end()


def state_of(ranks: list[Rank | Process]) -> list[str]:
    """One digest of each memory: all that have it see the same."""
    seen: dict[str, str] = {}
    for one in ranks:
        for name, value in one.digests():
            verify(seen.setdefault(name, value) == value, f"{name} is not the same for all")
    return [seen[name] for name in sorted(seen)]


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--rank", type=int, help="serve as this rank")
    options_parser.add_argument("--peer", type=int, help="the descriptor to serve on")
    options_parser.add_argument("--words", type=int, default=4096, help="words of a block")
    options_parser.add_argument("--gpus", type=int, default=1, help="GPUs that the ranks are on")
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    if arguments.rank is not None:
        with socket.socket(fileno=arguments.peer) as peer:
            serve(Rank(arguments.rank, options.device, options.seed, arguments.words), peer)
        return
    report = Report(options)
    words = 32 << 20 if options.big else arguments.words
    devices = [options.device + number % arguments.gpus for number in range(GUEST + 1)]
    others = [Process(n, devices[n], options.seed, words) for n in range(1, RANKS)]
    guest = Process(GUEST, devices[GUEST], options.seed, words)
    ranks: list[Rank | Process] = [Rank(0, devices[0], options.seed, words), *others]
    exchange(ranks, guest)
    ranks[2].let_go()
    for step in range(options.steps):
        before = state_of(ranks)
        for one in ranks:
            one.step(step)
        report.step(step, digest(*(value.encode() for value in [*before, *state_of(ranks)])))
    for other in others:
        other.end()
    report.done()


if __name__ == "__main__":
    guarded(main)
