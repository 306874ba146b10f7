"""The driver rewound inside its process, and initialised again."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading

from cuda.bindings import driver as cu

from tests.emu.driver_lib import GRANULE, R, case, launch_wait, ok, refuses, slots, start
from tests.emu.rewind_lib import (
    WINDOW,
    Life,
    Refused,
    Rewinder,
    accessible,
    device_descriptors,
    inaccessible,
    mapped,
    mappings,
    nothing_is_left,
    threads,
    unmap,
)

WINDOW_BYTES = 64 * GRANULE


@case()
def a_rewound_driver_begins_afresh() -> None:
    driver = Rewinder()
    own, reserved = set(threads()), []
    for _ in range(3):
        life = Life()
        assert set(threads()) != own
        driver.strip()
        nothing_is_left()
        assert set(threads()) == own
        assert not accessible(life.address) and not mapped(WINDOW)
        reserved.append(inaccessible())
        refuses(cu.cuMemAlloc(4), "NOT_INITIALIZED")
        ok(cu.cuInit(0))
        refuses(cu.cuMemAlloc(4), "INVALID_CONTEXT")
        assert int(ok(cu.cuCtxGetCurrent())) == 0
    assert reserved[1] == reserved[2]  # the first life has left malloc an arena for its threads


@case(emulated=True)
def no_handle_outlives_its_life() -> None:
    driver = Rewinder()
    life = Life()
    for _ in range(3):
        driver.strip()
        old, life = life, Life()
        old.is_dead()
        life.check()


@case()
def a_driver_that_was_not_initialised_can_be_rewound() -> None:
    driver = Rewinder()
    driver.strip()
    nothing_is_left()
    Life()


@case()
def addresses_that_are_kept_stay_ours() -> None:
    driver = Rewinder()
    for _ in range(2):
        Life()
        driver.strip([(WINDOW, WINDOW_BYTES)])
        nothing_is_left()
        assert (WINDOW, WINDOW + WINDOW_BYTES, "---p", "") in mappings()
        start()
        elsewhere = int(ok(cu.cuMemAddressReserve(GRANULE, 0, WINDOW, 0)))
        assert not WINDOW <= elsewhere < WINDOW + WINDOW_BYTES
        driver.strip([(WINDOW, WINDOW_BYTES)])
        unmap(WINDOW, WINDOW_BYTES)


@case()
def ranges_that_are_no_pages_are_refused_and_nothing_changes() -> None:
    driver = Rewinder()
    life = Life()
    before = threads()
    for wrong in ((WINDOW + 1, 4096), (WINDOW, 100), (WINDOW, 0)):
        try:
            driver.strip([wrong])
        except Refused as refusal:
            assert "whole pages" in str(refusal)
        else:
            raise AssertionError("it was not refused")
        assert threads() == before
        life.check()


@case()
def a_programs_threads_live_on_and_forget_their_contexts() -> None:
    driver = Rewinder()
    context = start()
    over, meeting = threading.Event(), threading.Barrier(31)
    seen: list[tuple[object, int]] = []
    rounds = [0]

    def idle() -> None:
        for _ in range(4):
            meeting.wait()  # a life has begun
            seen.append(cu.cuCtxGetCurrent())
            ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
            meeting.wait()  # it may end

    def busy() -> None:
        data = bytes(1 << 16)  # long enough for the interpreter's lock to be free meanwhile
        while not over.is_set():
            data = data[:-32] + hashlib.sha256(data).digest()
            rounds[0] += 1

    workers = [threading.Thread(target=idle) for _ in range(30)]
    workers.append(threading.Thread(target=busy))
    for worker in workers:
        worker.start()
    for life in range(4):
        meeting.wait()
        meeting.wait()
        assert [(R(result), int(found)) for result, found in seen] == 30 * [(R.CUDA_SUCCESS, 0)]
        seen.clear()
        if life < 3:
            driver.strip()
            nothing_is_left()
            before = rounds[0]
            while rounds[0] == before:
                over.wait(0.001)
            Life()
    over.set()
    for worker in workers:
        worker.join()
    assert int(context) != 0


@case(emulated=True)
def a_kernel_that_runs_does_not_keep_a_driver_from_ending() -> None:
    driver = Rewinder()
    life = Life()
    flag = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    wait = ok(cu.cuModuleGetFunction(life.module, b"wait_for"))
    ok(launch_wait(wait, flag, life.stream))
    driver.strip()
    nothing_is_left()
    Life()


@case(emulated=True)
def init_fails_while_a_socket_of_an_earlier_life_is_open() -> None:
    driver = Rewinder()
    start()
    held, hold = os.pipe()
    child = os.fork()  # it keeps what its parent closes
    if child == 0:
        os.close(hold)
        os.read(held, 1)
        os._exit(0)
    driver.strip()
    assert not device_descriptors()
    refuses(cu.cuInit(0), "OPERATING_SYSTEM")
    os.close(hold)
    os.waitpid(child, 0)
    Life()


@case(emulated=True)
def what_an_earlier_life_stored_with_its_contexts_is_gone() -> None:
    driver = Rewinder()
    for _ in range(2):
        context, key = start(), ctypes.c_void_p(4711)
        put, delete, get = slots("c693336e1121df11a8c368f355d89593", 3)
        (*_, primary) = slots("6bd5fb6c5bf4e74a8987d93912fd9df9", 3)
        found = ctypes.c_void_p()
        assert primary(ctypes.byref(found), 0) == 0 and found.value == int(context)
        other = ctypes.c_void_p(int(ok(cu.cuCtxCreate(None, 0, 0))))
        ok(cu.cuCtxPopCurrent())
        assert get(ctypes.byref(found), None, key) == int(R.CUDA_ERROR_INVALID_HANDLE)
        assert put(None, key, ctypes.c_void_p(1), None) == 0
        assert put(other, key, ctypes.c_void_p(2), None) == 0
        for where, value in ((None, 1), (ctypes.c_void_p(int(context)), 1), (other, 2)):
            assert get(ctypes.byref(found), where, key) == 0 and found.value == value
        assert delete(other, key) == 0
        assert delete(other, key) == int(R.CUDA_ERROR_INVALID_HANDLE)
        assert put(other, key, ctypes.c_void_p(3), None) == 0
        ok(cu.cuCtxDestroy(cu.CUcontext(other.value)))
        assert get(ctypes.byref(found), other, key) == int(R.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        driver.strip()
        assert get(ctypes.byref(found), None, key) != 0
