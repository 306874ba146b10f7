"""One operation after the other, out of what a program has made so far; see program_gen.

A step's bytes choose among what makes sense at that place, and 0 is always the ordinary choice, so
that hypothesis makes a failing program plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.emu.program_lib import GARBAGE, IMAGES, KERNELS, LEGACY, NAMES, NULL, PER_THREAD

T = TypeVar("T")
GRANULE = 2 << 20
HUGE = (1 << 40, 1 << 60, (1 << 64) - 1)
SIZES = (100, 4, 512, 513, 4096, 65536, 1 << 20, (1 << 20) + 1, GRANULE, GRANULE + 1, 3 << 20, 1)
OFFSETS = (0, 4, 1, 16, 508, 512)


class Dice:
    """Choices out of a step's bytes; the first of everything when they are used up."""

    def __init__(self, data: bytes) -> None:
        self.left = list(reversed(data))

    def byte(self) -> int:
        return self.left.pop() if self.left else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def rarely(self, one_in: int = 12) -> bool:
        return self.byte() >= 256 - 256 // one_in


@dataclass
class Area:
    """Device addresses that a program has: how many bytes, and whether they are still there."""

    size: int
    live: bool = True
    of_pool: bool = False


@dataclass
class Builder:
    """What a program has made so far, as far as a sound driver would have let it."""

    program: list[list[Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    gone: dict[str, set[int]] = field(default_factory=dict)
    areas: list[Area] = field(default_factory=list)  # "m"
    hosts: list[Area] = field(default_factory=list)  # "h"
    registered: set[int] = field(default_factory=set)
    reserved: list[Area] = field(default_factory=list)  # "v"
    mapped: dict[int, dict[int, int]] = field(default_factory=dict)  # reservation: offset, size
    created: list[int] = field(default_factory=list)  # sizes of handles
    globals: list[bool] = field(default_factory=list)  # whether they exist
    kernels: dict[int, str] = field(default_factory=dict)  # functions that exist
    nodes: dict[int, tuple[str, int]] = field(default_factory=dict)  # kind and graph
    copies: dict[int, int] = field(default_factory=dict)  # graph: of which, or of nobody knows
    executables: dict[int, int] = field(default_factory=dict)  # graph
    shapes: dict[int, str] = field(default_factory=dict)  # of arrays, as kernels name them
    stored: set[int] = field(default_factory=set)  # arrays of which surfaces may be made
    levels: dict[int, int] = field(default_factory=dict)  # arrays: of which mipmapped one
    seen_of: dict[int, int] = field(default_factory=dict)  # texture and surface objects: array
    readers: dict[int, str] = field(default_factory=dict)  # the kernel for a texture object
    lines: dict[int, int] = field(default_factory=dict)  # of which allocation one is

    def made(self, kind: str) -> int:
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return number

    def end(self, kind: str, number: int) -> int:
        self.gone.setdefault(kind, set()).add(number)
        return number

    # -- choices

    def old(self, kind: str, d: Dice, special: Sequence[int] = ()) -> int:
        """An object that is there; rarely none, one that was destroyed, one that never was."""
        gone = self.gone.get(kind, set())
        if d.rarely():
            return d.pick([NULL, *sorted(gone), GARBAGE])
        live = [n for n in range(self.counts.get(kind, 0)) if n not in gone]
        if not live and not special:
            self.program.append(MAKERS[kind](self, Dice(b"")))
            live = [self.counts[kind] - 1]
        return d.pick([*reversed(live), *special])

    def stream(self, d: Dice) -> int:
        return self.old("stream", d, (NULL, LEGACY, PER_THREAD))

    def perhaps_stream(self, d: Dice) -> int | None:
        return self.stream(d) if d.byte() % 2 else None

    def device(self, d: Dice) -> int:
        return d.pick((99, -1)) if d.rarely(24) else 0

    def where(self, d: Dice) -> tuple[list[Any], int]:
        """An address of the device, and how many bytes there are from it on."""
        if d.rarely():
            return self.nowhere(d), 64
        places: list[tuple[str, int, int, int]] = [
            ("m", n, 0, area.size) for n, area in reversed(list(enumerate(self.areas))) if area.live
        ]
        for number, maps in self.mapped.items():
            places += [("v", number, offset, size) for offset, size in maps.items()]
        places += [("g", n, 0, 4) for n, there in enumerate(self.globals) if there]
        if not places:
            self.program.append(self.alloc(Dice(b"")))
            places = [("m", len(self.areas) - 1, 0, self.areas[-1].size)]
        kind, number, offset, size = d.pick(places)
        into = d.pick(OFFSETS) if d.byte() % 2 else 0
        into = into if into < size else 0
        return [kind, number, offset + into], size - into

    def nowhere(self, d: Dice) -> list[Any]:
        dead = [n for n, area in enumerate(self.areas) if not area.live]
        choices: list[list[Any]] = [["n", NULL, 0], ["n", NULL, 0x10000], ["n", NULL, HUGE[0]]]
        choices += [["m", n, 0] for n in dead]
        choices += [["v", n, GRANULE] for n in range(len(self.reserved))]
        choices += [["h", n, 0] for n in range(len(self.hosts))]
        return d.pick(choices)

    def extent(self, d: Dice, there: int) -> int:
        if d.rarely():
            return d.pick((0, there + 1, there + (16 << 20), *HUGE))
        ordinary = min(there, 4096)
        return d.pick((ordinary, min(there, 4), min(there, 1 << 20), max(1, ordinary // 3)))

    def host_side(self, d: Dice, size: int) -> list[Any]:
        """Host memory for `size` bytes, or what is none."""
        if d.rarely(24):
            return ["n", NULL, 0]
        fitting = [n for n, a in enumerate(self.hosts) if a.live and a.size >= size]
        if fitting and d.byte() % 2:
            return ["h", d.pick(fitting), 0]
        return ["b", d.byte() % 4, 0]

    # -- allocations

    def alloc(self, d: Dice) -> list[Any]:
        size = d.pick((0, *HUGE)) if d.rarely() else d.pick(SIZES)
        self.areas.append(Area(size, 0 < size < HUGE[0]))
        return ["alloc", size]

    def alloc_pitch(self, d: Dice) -> list[Any]:
        width, height = d.pick((100, 512, 513, 1)), d.pick((4, 1, 64))
        element = d.pick((4, 8, 16))
        if d.rarely():
            width, height, element = d.pick(((0, 4, 4), (4, 0, 4), (100, 4, 3)))
        sound = width > 0 and height > 0 and element != 3
        self.areas.append(Area(-(-width // 512) * 512 * height, sound))
        return ["alloc_pitch", width, height, element]

    def free(self, d: Dice) -> list[Any]:
        live = [n for n, area in enumerate(self.areas) if area.live]
        if not live or d.rarely(6):
            where, _ = self.where(d)
            if where[0] == "m" and where[2] == 0:
                self.areas[where[1]].live = False
            return ["free", where]
        number = d.pick(live)
        self.areas[number].live = False
        return ["free", ["m", number, 0]]

    def alloc_async(self, d: Dice) -> list[Any]:
        size = d.pick((0, *HUGE)) if d.rarely() else d.pick(SIZES)
        self.areas.append(Area(size, 0 < size < HUGE[0], of_pool=True))
        if self.counts.get("pool") and d.byte() % 2:
            return ["alloc_pool", size, self.old("pool", d), self.stream(d)]
        return ["alloc_async", size, self.stream(d)]

    def free_async(self, d: Dice) -> list[Any]:
        return ["free_async", self.free(d)[1], self.stream(d)]

    # -- host memory

    def host_alloc(self, d: Dice) -> list[Any]:
        size = d.pick((0, HUGE[1])) if d.rarely() else d.pick((4096, 100, 65536, 1 << 20))
        self.hosts.append(Area(size, 0 < size < HUGE[0]))
        return ["host_alloc", size, d.pick((0, 1, 2, 4)) if not d.rarely(24) else 64]

    def host_register(self, d: Dice) -> list[Any]:
        size = 0 if d.rarely() else d.pick((4096, 65536, 100))
        self.registered.add(len(self.hosts))
        self.hosts.append(Area(size, size > 0))
        offset, flags = d.pick((0, 0, 0, 64)), d.pick((0, 1)) if not d.rarely(24) else 64
        return ["host_register", size, offset, flags]

    def host_end(self, d: Dice) -> list[Any]:
        """Freed or unregistered, sometimes as what it is not, or twice."""
        places = [n for n, area in enumerate(self.hosts) if area.live]
        if not places or d.rarely(6):
            number, offset = d.byte() % (len(self.hosts) + 1), d.pick((0, 8))
            if number < len(self.hosts) and not offset:
                self.hosts[number].live = False
            return [d.pick(("host_free", "host_unregister")), ["h", number, offset]]
        number = d.pick(places)
        self.hosts[number].live = False
        return [
            "host_unregister" if number in self.registered else "host_free",
            ["h", number, 0],
        ]

    def host_ask(self, d: Dice) -> list[Any]:
        number = d.byte() % (len(self.hosts) + 1)
        if d.rarely():
            return ["host_register_again", ["h", number, 0], 4096]
        return ["host_flags", ["h", number, d.pick((0, 8))]]

    # -- mappings

    def reserve(self, d: Dice) -> list[Any]:
        size = d.pick((2, 1, 4)) * GRANULE
        alignment = d.pick((0, 0, GRANULE, 32 * GRANULE))
        if d.rarely():
            size, alignment = d.pick(((0, 0), (GRANULE + 1, 0), (GRANULE, 3), (4096, 0)))
        self.reserved.append(Area(size, size >= GRANULE and size % GRANULE == 0))
        return ["reserve", size, alignment]

    def unreserve(self, d: Dice) -> list[Any]:
        unused = [n for n, a in enumerate(self.reserved) if a.live and not self.mapped.get(n)]
        number = d.pick(unused) if unused else d.byte() % (len(self.reserved) + 1)
        if number == len(self.reserved):
            return ["unreserve", self.nowhere(d), GRANULE]
        size = self.reserved[number].size
        if d.rarely(6):
            return ["unreserve", ["v", number, d.pick((0, GRANULE))], d.pick((GRANULE, size, 0))]
        if not self.mapped.get(number):
            self.reserved[number].live = False
        return ["unreserve", ["v", number, 0], size]

    def create(self, d: Dice) -> list[Any]:
        size = d.pick((1, 2, 1)) * GRANULE
        if d.rarely():
            size = d.pick((0, 4096, GRANULE + 1, 1 << 50))
        if not size or size % GRANULE or size > 1 << 40:
            self.end("handle", self.counts.get("handle", 0))
        self.made("handle")
        self.created.append(size)
        return ["create", size, self.device(d), d.pick((1, 0)) if not d.rarely(24) else 64]

    def map(self, d: Dice) -> list[Any]:
        handle = self.old("handle", d)
        size = self.created[handle] if 0 <= handle < len(self.created) else GRANULE
        places = [n for n, area in enumerate(self.reserved) if area.live and area.size >= size]
        if not places or d.rarely():
            where = d.pick((self.nowhere(d), *(["v", n, 4096] for n in places)))
            return ["map", where, d.pick((size, 0, GRANULE)), 0, handle]
        number = d.pick(places)
        maps = self.mapped.setdefault(number, {})
        free = [
            at
            for at in range(0, self.reserved[number].size - size + 1, GRANULE)
            if not any(at < o + s and o < at + size for o, s in maps.items())
        ]
        if not free or d.rarely():
            given = d.pick((size, GRANULE, 2 * size))
            return ["map", ["v", number, 0], given, d.pick((0, GRANULE)), handle]
        at = d.pick(free)
        if handle >= 0 and handle not in self.gone.get("handle", set()):
            maps[at] = size
        return ["map", ["v", number, at], size, 0, handle]

    def piece(self, d: Dice) -> tuple[list[Any], int, bool]:
        """A mapping, or a part of one, of two, of none; true: exactly one."""
        if d.rarely(8):
            number = d.byte() % (len(self.reserved) + 1)
            offset = d.pick((0, GRANULE, 4096))
            return ["v", number, offset], d.pick((GRANULE, 2 * GRANULE, 4096, 0)), False
        places = [(n, o, s) for n, maps in self.mapped.items() for o, s in maps.items()]
        if not places:
            self.program.append(self.map_all(d))
            return self.program[-1][1], self.program[-1][2], True
        number, offset, size = d.pick(places)
        return ["v", number, offset], size, True

    def unmap(self, d: Dice) -> list[Any]:
        where, size, exact = self.piece(d)
        if exact:
            del self.mapped[where[1]][where[2]]
        return ["unmap", where, size]

    def allow(self, d: Dice) -> list[Any]:
        where, size, _ = self.piece(d)
        return ["allow", where, size, self.device(d), d.pick((3, 3, 1, 0, 2))]

    def map_all(self, d: Dice) -> list[Any]:
        """A handle that may be written at once, which most programs want."""
        self.program += [self.reserve(Dice(b"")), self.create(Dice(bytes([d.byte()])))]
        self.program.append(self.map(Dice(b"")))
        return ["allow", self.program[-1][1], self.program[-1][2], 0, 3]

    def release(self, d: Dice) -> list[Any]:
        return ["release", self.end("handle", self.old("handle", d))]

    def retain(self, d: Dice) -> list[Any]:
        where, _, _ = self.piece(d)
        return ["retain", where if not d.rarely(8) else self.where(d)[0]]

    def export(self, d: Dice) -> list[Any]:
        self.made("fd")
        return ["export", self.old("handle", d)]

    def import_(self, d: Dice) -> list[Any]:
        fd = self.old("fd", d)
        self.made("handle")
        self.created.append(GRANULE)
        return ["import", fd]

    # -- copies

    def h2d(self, d: Dice) -> list[Any]:
        where, there = self.where(d)
        size = self.extent(d, there)
        return ["h2d", where, self.host_side(d, size), size, self.perhaps_stream(d)]

    def d2h(self, d: Dice) -> list[Any]:
        where, there = self.where(d)
        size = self.extent(d, min(there, 4 << 20))
        to = self.host_side(d, size)
        if to[0] == "n":
            return ["d2h", to, where, min(size, 16), None]
        return ["d2h", to, where, size, self.perhaps_stream(d)]

    def d2d(self, d: Dice) -> list[Any]:
        to, there = self.where(d)
        source, here = self.where(d)
        overlap = to[:2] == source[:2]
        size = 0 if overlap else self.extent(d, min(there, here))
        return ["d2d", to, source, size, self.perhaps_stream(d)]

    def unified(self, d: Dice) -> list[Any]:
        where, there = self.where(d)
        size = self.extent(d, there)
        if where[0] == "h":  # a copy from host to host writes over whatever lies behind it
            host = self.hosts[where[1]]
            size = min(size, host.size) if host.live else 0
        return ["unified", where, self.host_side(d, size), size, self.perhaps_stream(d)]

    def read(self, d: Dice) -> list[Any]:
        where, there = self.where(d)
        return ["read", where, min(there, 1 << 20)]

    def set(self, d: Dice) -> list[Any]:
        bits = d.pick((32, 8, 16))
        where, there = self.where(d)
        if not d.rarely():
            where = [*where[:2], where[2] // 4 * 4]
        count = self.extent(d, there) // (bits // 8)
        return ["set", bits, where, d.byte() * 0x01010101, count, self.perhaps_stream(d)]

    def set2d(self, d: Dice) -> list[Any]:
        where, there = self.where(d)
        bits, pitch = d.pick((8, 32, 16)), d.pick((64, 16, 512))
        width = pitch // (bits // 8) if not d.rarely() else pitch + 1
        height = max(1, min(there // pitch, 4)) if not d.rarely() else d.pick((0, 1 << 20))
        return ["set2d", bits, [*where[:2], where[2] // 4 * 4], pitch, d.byte(), width, height]

    def copy2d(self, d: Dice) -> list[Any]:
        way = d.pick(("h2d", "d2h", "d2d"))
        ends = []
        for side in (way[-1], way[0]):
            if side == "h":
                ends.append([["b", d.byte() % 4, 0], 64, d.pick((0, 8)), d.pick((0, 2))])
            else:
                where, _ = self.where(d)
                pitch = d.pick((64, 128, 0)) if not d.rarely() else d.pick((8, 1 << 40))
                ends.append([where, pitch, d.pick((0, 8)), d.pick((0, 2))])
        height = d.pick((1, 3, 2)) if not d.rarely() else d.pick((0, 1 << 30))
        if way != "d2d":
            height = min(height, 64)
        width = d.pick((32, 56)) if not d.rarely() else d.pick((0, 100))
        return ["copy2d", way, *ends, width, height, self.perhaps_stream(d)]

    # -- contexts

    def retain_primary(self, d: Dice) -> list[Any]:
        self.made("ctx")
        return ["retain_primary", self.device(d)]

    def context(self, d: Dice) -> list[Any]:
        if self.counts.get("ctx", 0) >= 3:
            return ["current"]
        self.made("ctx")
        return ["context", 0 if not d.rarely() else d.pick((8, 1, 64, 1 << 20)), self.device(d)]

    def end_context(self, d: Dice) -> list[Any]:
        return ["end_context", self.end("ctx", self.old("ctx", d))]

    def pool_default(self, d: Dice) -> list[Any]:
        self.made("pool")
        return ["pool_default", self.device(d)]

    def pool_create(self, d: Dice) -> list[Any]:
        self.made("pool")
        return ["pool_create", self.device(d)]

    # -- streams and events

    def new_stream(self, d: Dice) -> list[Any]:
        self.made("stream")
        priority = d.pick((0, -1, -9, 3))
        return ["stream", d.pick((0, 1)) if not d.rarely(24) else d.pick((2, 8)), priority]

    def event(self, d: Dice) -> list[Any]:
        self.made("event")
        return ["event", d.pick((0, 2, 1)) if not d.rarely(24) else d.pick((4, 64))]

    def recorded(self, d: Dice) -> int:
        event = self.old("event", d)
        if d.byte() % 4 != 3:
            self.program.append(["record", event, self.stream(d)])
        return event

    # -- modules and kernels

    def module(self, d: Dice) -> list[Any]:
        image = d.pick(tuple(IMAGES)) if d.rarely(5) else "good"
        if image != "good":
            self.end("module", self.counts.get("module", 0))
        self.made("module")
        return ["module", image] if not d.rarely(64) else ["no_image"]

    def library(self, d: Dice) -> list[Any]:
        image = d.pick(tuple(IMAGES)) if d.rarely() else "good"
        if image != "good":
            self.end("library", self.counts.get("library", 0))
        self.made("library")
        return ["library", image]

    def function(self, d: Dice) -> list[Any]:
        libraries = self.counts.get("library", 0) and d.byte() % 2
        parent = "library" if libraries else "module"
        given = self.old(parent, d)
        name = d.pick(NAMES) if d.rarely() else d.pick(KERNELS)
        if given >= 0 and given not in self.gone.get(parent, set()) and name in KERNELS:
            self.kernels[self.counts.get("function", 0)] = name
        else:
            self.end("function", self.counts.get("function", 0))
        self.made("function")
        return ["function" if parent == "module" else "kernel", given, name]

    def variable(self, d: Dice) -> list[Any]:
        libraries = self.counts.get("library", 0) and d.byte() % 2
        parent = "library" if libraries else "module"
        given = self.old(parent, d)
        name = d.pick(("counter", "table")) if not d.rarely() else d.pick(("none", "inc"))
        sound = given >= 0 and given not in self.gone.get(parent, set())
        self.globals.append(sound and name in ("counter", "table"))
        return ["global" if parent == "module" else "library_global", given, name]

    def ready(self, d: Dice) -> int:
        """A function; makes a module and one first where there is none."""
        if not self.kernels:
            self.program.append(self.function(Dice(bytes([0, 0, 0, 0, d.byte()]))))
        return self.old("function", d)

    def launch(self, d: Dice) -> list[Any]:
        function = self.ready(d)
        where, there = self.where(d)
        threads = min(there // 4, 64) or 1
        where = [*where[:2], where[2] // 4 * 4]
        shape, shared = [1, 1, 1, threads, 1, 1], 4 * threads
        if d.rarely(5):
            shape = d.pick(BAD_SHAPES)
            shared = d.pick((256, 48 << 10, (48 << 10) + 1, 200 << 10, 1 << 20))
        if self.kernels.get(function) == "turn":
            shared = max(shared, 4 * shape[3])
        if d.rarely():
            where[2] += d.pick((2, 64 << 20, 1))
        given = where if not d.rarely(24) else None
        return ["launch", function, shape, shared, self.stream(d), given, threads]

    def start(self, d: Dice) -> list[Any]:
        areas = [n for n, area in enumerate(self.areas) if area.live and area.size >= 4]
        sound = [n for n, name in self.kernels.items() if name == "inc"]
        sound = [n for n in sound if n not in self.gone.get("function", set())]
        if not areas or not sound:
            return self.launch(d)
        number = d.pick(areas)
        count = min(self.areas[number].size // 4, 1024)
        return ["start", d.pick(sound), self.stream(d), ["m", number, 0], count]


BAD_SHAPES = (
    [2, 1, 1, 32, 1, 1],
    [1, 1, 1, 1024, 1, 1],
    [1, 1, 1, 1025, 1, 1],
    [1, 1, 1, 2048, 1, 1],
    [1, 1, 1, 1, 1, 65],
    [1, 1, 1, 32, 32, 2],
    [0, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 1, 1],
    [1, 65536, 1, 1, 1, 1],
    [1, 1, 65536, 1, 1, 1],
    [1 << 31, 1, 1, 1, 1, 1],
)

# Where an operation needs an object and there is none.
MAKERS: dict[str, Callable[[Builder, Dice], list[Any]]] = {
    "ctx": Builder.retain_primary,
    "event": Builder.event,
    "fd": Builder.export,
    "function": Builder.function,
    "handle": Builder.create,
    "library": Builder.library,
    "module": Builder.module,
    "pool": Builder.pool_default,
    "stream": Builder.new_stream,
}
