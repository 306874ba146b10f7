"""The driver rewound inside its process, and initialised again."""

from __future__ import annotations

from cuda.bindings import driver as cu

from tests.emu.driver_lib import GRANULE, case, ok, refuses
from tests.emu.rewind_lib import (
    WINDOW,
    Life,
    Rewinder,
    inaccessible,
    mapped,
    mappings,
    nothing_is_left,
    threads,
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
        assert not mapped(life.address) and not mapped(WINDOW)
        reserved.append(inaccessible())
        refuses(cu.cuMemAlloc(4), "NOT_INITIALIZED")
        ok(cu.cuInit(0))
        refuses(cu.cuMemAlloc(4), "INVALID_CONTEXT")
        assert int(ok(cu.cuCtxGetCurrent())) == 0
        ok(cu.cuDevicePrimaryCtxRetain(0))
        life.is_dead()
    assert reserved[1] == reserved[2]  # the first life has left malloc an arena for its threads


@case()
def addresses_that_are_kept_stay_ours() -> None:
    driver = Rewinder()
    Life()
    driver.strip([(WINDOW, WINDOW_BYTES)])
    nothing_is_left()
    assert (WINDOW, WINDOW + WINDOW_BYTES, "---p", "") in mappings()
