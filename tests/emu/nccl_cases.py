"""What ranks of NCCL do, against sums that numpy makes: `nccl_cases CASE FOLDER RANK RANKS`.

Each rank is a process with a GPU; a case of `one_process` makes all ranks itself.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.nccl_lib import (
    AVERAGE,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    TYPES,
    Array,
    Config,
    Device,
    Nccl,
    NcclError,
    UniqueId,
    communicator,
    ok,
    share_id,
    wait_for,
)

CASES: dict[str, Callable[[Rank], None]] = {}
LONG = 70_001  # elements: several chunks of every type, and a part of one


class Rank:
    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.device = Device(0)
        self.nccl = Nccl()
        self.stream = self.device.stream()

    def comm(self, name: str = "id") -> ctypes.c_void_p:
        ident = share_id(self.nccl, self.folder, self.rank, name)
        return communicator(self.nccl, ident, self.ranks, self.rank)

    def wait(self) -> None:
        ok(cu.cuStreamSynchronize(self.stream))


def case(body: Callable[[Rank], None]) -> Callable[[Rank], None]:
    CASES[body.__name__] = body
    return body


def part(rank: int, count: int, type_name: str, seed: int = 0) -> Array:
    random = np.random.default_rng([rank, count, seed])
    low = 0 if type_name.startswith("u") else -4
    return random.integers(low, 5, count).astype(type_name)


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def same(got: Array, wanted: Array) -> None:
    assert got.dtype == wanted.dtype
    wrong = np.flatnonzero(got != wanted)
    assert not wrong.size, (wrong[:4], got[wrong[:4]], wanted[wrong[:4]])


@case
def every_type_and_operation_is_reduced(r: Rank) -> None:
    comm = r.comm()
    folds = {SUM: np.add, PRODUCT: np.multiply, MAXIMUM: np.maximum, MINIMUM: np.minimum}
    for number, name in enumerate(TYPES):
        for operation, fold in folds.items():
            count = LONG if operation == SUM else 100
            parts = [part(rank, count, name) for rank in range(r.ranks)]
            wanted = parts[0]
            for one in parts[1:]:
                wanted = fold(wanted, one)
            data = r.device.put(parts[r.rank])  # in place
            r.nccl.AllReduce(data, data, size(count), number, operation, comm, r.stream)
            r.wait()
            same(r.device.get(data, count, name), wanted)
    parts = [part(rank, 100, "f4") for rank in range(r.ranks)]
    data = r.device.put(parts[r.rank])
    r.nccl.AllReduce(data, data, size(100), 7, AVERAGE, comm, r.stream)
    r.wait()
    same(r.device.get(data, 100, "f4"), np.sum(parts, 0, "f4") / np.float32(r.ranks))
    halves = (part(r.rank, 100, "f4").view("u4") >> 16).astype("u2")  # bf16, exact
    data = r.device.put(halves)
    r.nccl.AllReduce(data, data, size(100), 9, SUM, comm, r.stream)
    r.wait()
    same(r.device.get(data, 100, "u2"), (np.sum(parts, 0, "f4").view("u4") >> 16).astype("u2"))
    r.nccl.CommDestroy(comm)


@case
def every_collective_moves_its_parts(r: Rank) -> None:
    comm, n, root = r.comm(), r.ranks, r.ranks - 1
    for count in (1, 1000, LONG):
        own = part(r.rank, count * n, "i4")
        every = [part(rank, count * n, "i4") for rank in range(n)]
        blocks = [one.reshape(n, count) for one in every]
        source, target = r.device.put(own), r.device.put(np.zeros(count * n, "i4"))

        def result(
            elements: int, wanted: Array, source: object = source, target: object = target
        ) -> None:
            r.wait()
            same(r.device.get(target, elements, "i4"), wanted)

        c = size(count)
        r.nccl.ReduceScatter(source, target, c, 2, SUM, comm, r.stream)
        result(count, np.sum([one[r.rank] for one in blocks], 0, "i4"))
        r.nccl.AllGather(source, target, c, 2, comm, r.stream)
        result(count * n, np.concatenate([one[:count] for one in every]))
        r.nccl.AlltoAll(source, target, c, 2, comm, r.stream)
        result(count * n, np.concatenate([one[r.rank] for one in blocks]))
        r.nccl.Broadcast(source, target, c, 2, root, comm, r.stream)
        result(count, every[root][:count])
        r.nccl.Scatter(source, target, c, 2, root, comm, r.stream)
        result(count, blocks[root][r.rank])
        r.nccl.Reduce(source, target, c, 2, SUM, root, comm, r.stream)
        if r.rank == root:
            result(count, np.sum([one[:count] for one in every], 0, "i4"))
        r.nccl.Gather(source, target, c, 2, root, comm, r.stream)
        if r.rank == root:
            result(count * n, np.concatenate([one[:count] for one in every]))
        r.nccl.Bcast(source, c, 2, root, comm, r.stream)
        r.wait()
        same(r.device.get(source, count, "i4"), every[root][:count])
    r.nccl.CommDestroy(comm)


@case
def pairs_meet_in_groups_and_alone(r: Rank) -> None:
    comm, n, sides = r.comm(), r.ranks, r.device.stream()
    after, before = (r.rank + 1) % n, (r.rank - 1) % n
    for count in (0, 5, LONG, 40 * LONG):  # the last does not fit into what lies between
        source = r.device.put(part(r.rank, count, "u1"))
        target = r.device.put(np.zeros(count, "u1"))
        r.nccl.GroupStart()
        r.nccl.Send(source, size(count), 1, after, comm, r.stream)
        r.nccl.Recv(target, size(count), 1, before, comm, sides)
        r.nccl.GroupEnd()
        ok(cu.cuStreamSynchronize(sides))
        same(r.device.get(target, count, "u1"), part(before, count, "u1"))
    # More than a kernel takes, the own rank among the peers, and a sum of all before them.
    count, rounds = 50, 40
    sources = [r.device.put(part(r.rank, count, "i4", k)) for k in range(rounds)]
    targets = [[r.device.put(np.zeros(count, "i4")) for _ in range(n)] for _ in range(rounds)]
    total = r.device.put(np.full(3, r.rank, "i4"))
    r.nccl.GroupStart()
    for k in range(rounds):
        for peer in range(n):
            r.nccl.Send(sources[k], size(count), 2, peer, comm, r.stream)
            r.nccl.Recv(targets[k][peer], size(count), 2, peer, comm, r.stream)
    r.nccl.AllReduce(total, total, size(3), 2, SUM, comm, r.stream)
    r.nccl.GroupEnd()
    r.wait()
    for k in range(rounds):
        for peer in range(n):
            same(r.device.get(targets[k][peer], count, "i4"), part(peer, count, "i4", k))
    same(r.device.get(total, 3, "i4"), np.full(3, sum(range(n)), "i4"))
    # A small message needs no receiver yet: rank 0 is done before the last rank begins.
    if r.rank == 0:
        r.nccl.Send(sources[0], size(count), 2, n - 1, comm, r.stream)
        r.wait()
        (r.folder / "sent").touch()
    if r.rank == n - 1:
        while not (r.folder / "sent").exists():
            time.sleep(0.002)
        r.nccl.Recv(targets[0][0], size(count), 2, 0, comm, r.stream)
        r.wait()
        same(r.device.get(targets[0][0], count, "i4"), part(0, count, "i4"))
    r.nccl.CommDestroy(comm)


@case
def children_have_the_ranks_that_were_asked_for(r: Rank) -> None:
    comm, child, n = r.comm(), ctypes.c_void_p(), r.ranks
    r.nccl.CommSplit(comm, r.rank % 2, -r.rank, ctypes.byref(child), None)
    others = sorted((rank for rank in range(n) if rank % 2 == r.rank % 2), reverse=True)
    number = ctypes.c_int()
    r.nccl.CommUserRank(child, ctypes.byref(number))
    assert others[number.value] == r.rank
    r.nccl.CommCount(child, ctypes.byref(number))
    assert number.value == len(others)
    r.nccl.CommCuDevice(child, ctypes.byref(number))
    assert number.value == r.device.number
    data = r.device.put(np.full(5, r.rank, "i4"))
    r.nccl.AllReduce(data, data, size(5), 2, SUM, child, r.stream)
    r.wait()
    same(r.device.get(data, 5, "i4"), np.full(5, sum(others), "i4"))
    none = ctypes.c_void_p(5)
    r.nccl.CommSplit(comm, 0 if r.rank else -1, 0, ctypes.byref(none), None)
    assert (none.value is None) == (r.rank == 0)
    if r.rank:
        r.nccl.CommDestroy(none)
        left, out = ctypes.c_void_p(), (ctypes.c_int * 1)(0)
        r.nccl.CommShrink(comm, out, 1, ctypes.byref(left), None, 0)
        data = r.device.put(np.full(5, r.rank, "i4"))
        r.nccl.AllReduce(data, data, size(5), 2, SUM, left, r.stream)
        r.wait()
        same(r.device.get(data, 5, "i4"), np.full(5, sum(range(1, n)), "i4"))
        r.nccl.CommDestroy(left)
    r.nccl.GroupStart()
    r.nccl.CommDestroy(child)
    r.nccl.CommDestroy(comm)
    r.nccl.GroupEnd()


@case
def several_communicators_are_made_in_a_group(r: Rank) -> None:
    idents = [share_id(r.nccl, r.folder, r.rank, f"id{k}") for k in range(3)]
    comms = [ctypes.c_void_p() for _ in idents]
    r.nccl.GroupStart()
    for k in range(3) if r.rank else (2, 1, 0):
        r.nccl.CommInitRank(ctypes.byref(comms[k]), r.ranks, idents[k], r.rank)
    r.nccl.GroupEnd()
    data = [r.device.put(np.full(9, r.rank + k, "f4")) for k in range(3)]
    streams = [r.device.stream() for _ in range(3)]
    for turn in range(20):
        # In other orders, without a wait in between; the first use connects, in one order.
        for k in range(3) if turn == 0 or (turn + r.rank) % 2 else (2, 0, 1):
            r.nccl.Broadcast(data[k], data[k], size(9), 7, turn % r.ranks, comms[k], streams[k])
    ok(cu.cuCtxSynchronize())
    for k in range(3):
        same(r.device.get(data[k], 9, "f4"), np.full(9, k, "f4"))
        r.nccl.CommDestroy(comms[k])


@case
def who_does_not_block_asks_how_it_goes_on(r: Rank) -> None:
    ident, comm = share_id(r.nccl, r.folder, r.rank), ctypes.c_void_p()
    config, state, waits = Config.made(blocking=0), ctypes.c_int(), 0
    asked = r.folder / "asked"
    if r.rank:
        wait_for(asked)
    init = r.nccl.library.ncclCommInitRankConfig
    result = init(ctypes.byref(comm), r.ranks, ident, r.rank, ctypes.byref(config))
    assert result == IN_PROGRESS
    while True:
        r.nccl.CommGetAsyncError(comm, ctypes.byref(state))
        if state.value != IN_PROGRESS:
            break
        waits += 1
        asked.touch()
        time.sleep(0.001)
    assert state.value == 0 and (waits or r.rank)
    data = r.device.put(np.full(5, r.rank, "i4"))
    assert r.nccl.library.ncclAllReduce(
        *(ctypes.c_void_p(int(data)), ctypes.c_void_p(int(data)), size(5), 2, SUM, comm),
        ctypes.c_void_p(int(r.stream)),
    ) in (0, IN_PROGRESS)
    while state.value == IN_PROGRESS or not waits:
        r.nccl.CommGetAsyncError(comm, ctypes.byref(state))
        waits += 1
    r.nccl.CommGetAsyncError(comm, ctypes.byref(state))
    while state.value == IN_PROGRESS:
        r.nccl.CommGetAsyncError(comm, ctypes.byref(state))
    r.wait()
    same(r.device.get(data, 5, "i4"), np.full(5, sum(range(r.ranks)), "i4"))
    r.nccl.CommFinalize(comm)
    r.nccl.CommDestroy(comm)


@case
def a_missing_peer_hangs_the_stream_until_the_communicator_is_aborted(r: Rank) -> None:
    comm = r.comm()
    data = r.device.put(np.full(5, r.rank, "i4"))
    r.nccl.AllReduce(data, data, size(5), 2, SUM, comm, r.stream)
    r.wait()
    if r.rank == 0:
        r.nccl.AllReduce(data, data, size(5), 2, SUM, comm, r.stream)
        time.sleep(0.3)
        assert cu.cuStreamQuery(r.stream)[0] == cu.CUresult.CUDA_ERROR_NOT_READY
        (r.folder / "hung").touch()
    while not (r.folder / "hung").exists():  # a peer that has ended would be an error
        time.sleep(0.001)
    r.nccl.CommAbort(comm)
    r.wait()


@case
def captured_operations_are_done_at_each_launch(r: Rank) -> None:
    comm, sides = r.comm(), r.device.stream()
    data, token = r.device.put(np.full(5, 1, "i4")), r.device.put(np.full(2, r.rank, "i4"))
    fork, join = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    ok(cu.cuStreamBeginCapture(r.stream, mode))
    r.nccl.AllReduce(data, data, size(5), 2, SUM, comm, r.stream)  # connects meanwhile
    ok(cu.cuEventRecord(fork, r.stream))
    ok(cu.cuStreamWaitEvent(sides, fork, 0))
    r.nccl.AllReduce(token, token, size(2), 2, MAXIMUM, comm, sides)
    r.nccl.AllReduce(data, data, size(5), 2, SUM, comm, r.stream)
    ok(cu.cuEventRecord(join, sides))
    ok(cu.cuStreamWaitEvent(r.stream, join, 0))
    graph = ok(cu.cuStreamEndCapture(r.stream))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    for turn in range(1, 4):
        ok(cu.cuGraphLaunch(executable, r.stream))
        r.nccl.AllReduce(token, token, size(2), 2, MINIMUM, comm, sides)  # between the graphs
        ok(cu.cuCtxSynchronize())
        same(r.device.get(data, 5, "i4"), np.full(5, r.ranks ** (2 * turn), "i4"))
        same(r.device.get(token, 2, "i4"), np.full(2, r.ranks - 1, "i4"))
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))
    r.nccl.CommDestroy(comm)


@case
def one_process_has_all_gpus(r: Rank) -> None:
    n = r.ranks
    comms = (ctypes.c_void_p * n)()
    r.nccl.CommInitAll(comms, n, None)
    devices = [Device(number) for number in range(n)]
    streams, data, parts = [], [], [part(rank, LONG, "f4") for rank in range(n)]
    for rank, device in enumerate(devices):
        device.use()
        streams.append(device.stream())
        data.append(device.put(parts[rank]))
    for _ in range(2):
        r.nccl.GroupStart()
        for rank in range(n):
            count = size(LONG)
            r.nccl.AllReduce(
                data[rank], data[rank], count, 7, SUM, ctypes.c_void_p(comms[rank]), streams[rank]
            )
        r.nccl.GroupEnd()
        parts = [np.sum(parts, 0, "f4")] * n
    for rank, device in enumerate(devices):
        device.use()
        ok(cu.cuStreamSynchronize(streams[rank]))
        same(device.get(data[rank], LONG, "f4"), parts[0])
    for rank in range(n):  # in turn: none may wait for the next one's
        r.nccl.CommDestroy(ctypes.c_void_p(comms[rank]))


@case
def misuse_is_named(r: Rank) -> None:
    comm = r.comm()

    def refused(code: int, words: str, name: str, *arguments: object) -> None:
        try:
            getattr(r.nccl, name)(*arguments)
        except NcclError as error:
            assert f"({code})" in str(error) and words in str(error), error
        else:
            raise AssertionError(name)

    data, nowhere = r.device.put(np.zeros(5, "i4")), ctypes.byref(ctypes.c_void_p())
    five = size(5)
    refused(INVALID_ARGUMENT, "data type 77", "AllReduce", data, data, five, 77, 0, comm, r.stream)
    refused(INVALID_ARGUMENT, "operation 9", "AllReduce", data, data, five, 2, 9, comm, r.stream)
    refused(INVALID_ARGUMENT, "rank 9", "Send", data, five, 2, 9, comm, r.stream)
    refused(INVALID_ARGUMENT, "no unique id", "CommInitRank", nowhere, 1, UniqueId(), 0)
    refused(INVALID_USAGE, "without", "GroupEnd")
    refused(INVALID_USAGE, "no receive", "Send", data, five, 2, r.rank, comm, r.stream)
    operation, scalar = ctypes.c_int(), ctypes.c_float(0.5)
    r.nccl.RedOpCreatePreMulSum(ctypes.byref(operation), ctypes.byref(scalar), 7, 1, comm)
    floats = r.device.put(np.full(5, r.rank, "f4"))
    r.nccl.AllReduce(floats, floats, five, 7, operation.value, comm, r.stream)
    r.wait()
    same(r.device.get(floats, 5, "f4"), np.full(5, sum(range(r.ranks)) / 2, "f4"))
    r.nccl.RedOpDestroy(operation.value, comm)
    args = (floats, floats, five, 7, operation.value, comm, r.stream)
    refused(INVALID_ARGUMENT, "operation", "AllReduce", *args)
    address = ctypes.c_void_p()
    r.nccl.MemAlloc(ctypes.byref(address), size(1000))
    ok(cu.cuMemsetD32(address.value, 3, 250))
    r.nccl.MemFree(address)
    r.nccl.CommDestroy(comm)
    refused(
        INVALID_ARGUMENT, "no communicator", "AllReduce", data, data, five, 2, 0, comm, r.stream
    )


if __name__ == "__main__":
    CASES[sys.argv[1]](Rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    print("passed", flush=True)
