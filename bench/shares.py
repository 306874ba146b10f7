"""Where the processor time of a job's step goes, by library, without FlowGPU and under it.

    python -m bench.shares [--gpu nvidia|emulated] [--job gpt2_short] [--engine replay|native|auto]
                           [--pairs N] [--seconds S] [--out FILE.json]

Step times of two processes differ by more than FlowGPU adds (overhead.py). What its own code takes
can be counted instead: every 100 us of a thread's processor time, the kernel notes where the thread
is (perf_event_open, the clock of the task). That is all that a call costs more within FlowGPU's
libraries, with the waiting for lines and pages that they touch; not what other code waits for
because of them.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import ctypes
import functools
import gc
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import machine
from bench.overhead import mean_interval
from bench.step_time import JOBS, SMALL_JOBS, WARM_UP, stay
from flowgpu import launch
from tests.faults.lanes import lane_name
from tests.gpu.site import Site, Trouble

PERIOD_NS = 100_000
RING_PAGES = 2048
SHOWN = 12
# <linux/perf_event.h>
PERF_EVENT_OPEN, ENABLE, DISABLE = 298, 0x2400, 0x2401
SOFTWARE, TASK_CLOCK, IP, TID, SAMPLE = 1, 1, 1, 2, 9
ATTRIBUTE_BYTES, HEAD_AT = 128, 1024
DISABLED, EXCLUDE_KERNEL = 1 << 0, 1 << 5


class Event:
    """Samples of one thread of this process, in user mode."""

    def __init__(self, thread: int) -> None:
        """Raises OSError where the kernel does not let us."""
        attribute = bytearray(ATTRIBUTE_BYTES)
        head = (SOFTWARE, ATTRIBUTE_BYTES, TASK_CLOCK, PERIOD_NS, IP | TID, 0)
        struct.pack_into("<IIQQQQQ", attribute, 0, *head, DISABLED | EXCLUDE_KERNEL)
        self._libc = ctypes.CDLL(None, use_errno=True)
        given = (ctypes.c_char * ATTRIBUTE_BYTES).from_buffer(attribute)
        self._fd = self._libc.syscall(PERF_EVENT_OPEN, given, thread, -1, -1, 0)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"perf_event_open: {os.strerror(error)}")
        self._ring = mmap.mmap(self._fd, (1 + RING_PAGES) * mmap.PAGESIZE)

    def set(self, enabled: bool) -> None:
        self._libc.ioctl(self._fd, ENABLE if enabled else DISABLE, 0)

    def addresses(self) -> Iterator[int]:
        """Address of the instruction at each sample. Raises OverflowError when some were lost."""
        (head,) = struct.unpack_from("<Q", self._ring, HEAD_AT)
        if head > RING_PAGES * mmap.PAGESIZE:
            raise OverflowError("more samples than there is room for; take fewer seconds")
        at = 0
        while at < head:
            kind, _, size = struct.unpack_from("<IHH", self._ring, mmap.PAGESIZE + at)
            if kind == SAMPLE:
                yield struct.unpack_from("<Q", self._ring, mmap.PAGESIZE + at + 8)[0]
            at += size


def is_ours(path: str) -> bool:
    """True if the path is one of FlowGPU's libraries; the emulated driver is none."""
    folder = os.path.realpath(launch.library_dir())
    return os.path.realpath(path).startswith(f"{folder}/") and "/emu/" not in path


class Code:
    """The functions of a library of ours, by their offset in the file."""

    def __init__(self, path: str) -> None:
        def lines(*words: str) -> list[list[str]]:
            done = subprocess.run([*words, path], capture_output=True, text=True, check=True)
            return [line.split(None, 8) for line in done.stdout.splitlines()]

        loads = [line for line in lines("readelf", "-lW") if line[:1] == ["LOAD"]]
        self._parts = [tuple(int(line[i], 16) for i in (1, 2, 4)) for line in loads]
        symbols = [line for line in lines("nm", "-C") if len(line) > 2 and line[1] in "tTwW"]
        self._symbols = sorted((int(line[0], 16), " ".join(line[2:])) for line in symbols)

    def name(self, offset: int) -> str:
        parts = self._parts
        at = next((offset - o + va for o, va, size in parts if o <= offset < o + size), offset)
        row = bisect.bisect(self._symbols, (at, "~")) - 1
        return self._symbols[row][1] if row >= 0 else hex(at)


def sampled(job: str, seconds: float, small: bool) -> dict[str, Any]:
    """What this process does while it makes steps. Raises OSError, OverflowError."""
    step = (JOBS | SMALL_JOBS if small else JOBS)[job]()
    for _ in range(WARM_UP):
        step()
    gc.collect()
    gc.disable()
    stay()
    events = [Event(int(thread)) for thread in os.listdir("/proc/self/task")]
    step()
    times = []
    for event in events:
        event.set(True)
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        step()
        times.append(time.perf_counter() - began)
    for event in events:
        event.set(False)
    known = machine.mappings()
    starts = [mapping.start for mapping in known]
    code = functools.lru_cache(None)(Code)
    libraries: collections.Counter[str] = collections.Counter()
    functions: collections.Counter[str] = collections.Counter()
    for address in (address for event in events for address in event.addresses()):
        mapping = known[max(bisect.bisect(starts, address) - 1, 0)]
        file = Path(mapping.path or "[anonymous]").name if address < mapping.end else "?"
        if is_ours(mapping.path):
            offset = address - mapping.start + mapping.offset
            functions[f"{file}: {code(mapping.path).name(offset)}"] += 1
            file = f"FlowGPU's {file}"
        libraries[file] += 1

    def a_step(counter: collections.Counter[str]) -> dict[str, float]:
        return {name: n * PERIOD_NS / 1000 / len(times) for name, n in counter.most_common()}

    return {
        "steps": len(times),
        "step_seconds": statistics.median(times),
        "us_a_step": a_step(libraries),
        "functions_us_a_step": a_step(functions),
    }


def measure(site: Site, options: argparse.Namespace, pair: int) -> Iterator[dict[str, Any]]:
    """A process without FlowGPU and one under it. Raises Trouble."""
    command = [sys.executable, "-m", "bench.shares", "--gpu", site.kind, "--job", options.job]
    command += ["--seconds", str(options.seconds), "--worker"]
    for variant in ("plain", "flowgpu") if pair % 2 else ("flowgpu", "plain"):
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "found.json"), Path(folder, "log")
            mine = ["env", "PYTHONHASHSEED=0", *command, os.fspath(out)]
            with log.open("wb") as said:
                if variant == "plain":
                    process = site.start_plain(mine, stdout=said, stderr=said)
                else:
                    words = ["run", "--gpu", site.kind, "--engine", options.engine, "--", *mine]
                    process = site.start(*words, stdout=said, stderr=said)
                if process.wait() != 0:
                    raise Trouble(f"{variant} {pair} failed: {log.read_text()[-2000:]}")
            yield {"variant": variant, "pair": pair, **json.loads(out.read_text())}


def ours(row: dict[str, Any]) -> float:
    return float(sum(row["functions_us_a_step"].values()))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What FlowGPU's libraries take of the time of the processes under it, as a part of all."""
    under = [row for row in rows if row["variant"] == "flowgpu"]
    shares = [ours(row) / sum(row["us_a_step"].values()) for row in under]
    return {
        "share_mean": statistics.mean(shares),
        "share_interval": mean_interval(shares),
        "ours_us_a_step": statistics.mean(map(ours, under)),
        "step_seconds": statistics.median(row["step_seconds"] for row in under),
    }


def table(rows: list[dict[str, Any]]) -> str:
    def mean(key: str, variant: str, name: str) -> float:
        return statistics.mean(r[key].get(name, 0) for r in rows if r["variant"] == variant)

    lines = ["| library | us a step without FlowGPU | with it |", "|---|---:|---:|"]
    names = {name for row in rows for name in row["us_a_step"]}
    found = [(mean("us_a_step", "flowgpu", n), mean("us_a_step", "plain", n), n) for n in names]
    lines += [f"| {n} | {plain:.1f} | {under:.1f} |" for under, plain, n in sorted(found)[::-1]]
    own = {name for row in rows for name in row["functions_us_a_step"]}
    most = sorted(((mean("functions_us_a_step", "flowgpu", n), n) for n in own), reverse=True)
    lines += ["", "| function of FlowGPU's | us a step |", "|---|---:|"]
    return "\n".join(lines + [f"| `{name}` | {us:.1f} |" for us, name in most[:SHOWN]])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.shares")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--job", choices=JOBS, default="gpt2_short")
    parser.add_argument("--engine", choices=["replay", "native", "auto"], default="replay")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0, help="of steps in each process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.worker:
        found = sampled(options.job, options.seconds, small=options.gpu == "emulated")
        options.worker.write_text(json.dumps(found))
        return 0
    document = machine.heading("shares", machine.of_module("bench.shares"))
    document |= {key: getattr(options, key) for key in ("gpu", "job", "engine")}
    document["lane"] = lane_name(options.gpu, "native")
    with Site(options.gpu) as site:
        rows = [row for pair in range(options.pairs) for row in measure(site, options, pair)]
    document |= summary(rows) | {"processes": rows}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    low, high = document["share_interval"]
    interval = "" if low is None else f" ({low:.2%} to {high:.2%} at 95 %)"
    print(
        f"\nFlowGPU's libraries: {document['share_mean']:.2%} of the processor time{interval}, "
        f"{document['ours_us_a_step']:.0f} us of a step of {document['step_seconds'] * 1000:.3f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
