"""Repeated images of a running job: what each one adds to the store, beside what has changed.

What has changed on the GPU the job itself writes down (workloads/_chunks.py), in pieces of 32 KiB;
what has changed in CPU memory is found by comparing whole dumps, page by page, afterwards.
"""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy

from bench.jobs import Measured
from bench.units import Unit, measure
from flowgpu.host import criu_images
from flowgpu.image.compression import plain_criu
from flowgpu.image.reader import Image
from tests.gpu.job import Job, last_step
from tests.gpu.site import Trouble

if TYPE_CHECKING:
    from bench.sections import Bench

CHUNK = 32 << 10
PAGE = 4096
PAGES_AT_ONCE = 4096
IMAGES = 4
EVERY_SECONDS, EVERY_SECONDS_SMALL = 4.0, 1.0
START_SECONDS, IMAGES_SECONDS = 180.0, 90.0
LOOK_SECONDS = 0.05
FIRST_STEPS = 3


@dataclass(frozen=True)
class Seen:
    """The store when an image was complete, and the job's last step then."""

    image: str
    step: int
    bytes: int  # of all files, each counted once however often it is linked
    cpu_bytes: int  # of those, what CRIU wrote and pages of CPU memory


def stored(folder: Path) -> tuple[int, int]:
    """Bytes of the files below `folder`, links once: all, and those of CPU memory."""
    sizes: dict[int, tuple[int, bool]] = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a partial image is renamed or removed meanwhile
            about = path.stat()
            if path.is_file():
                of_cpu = "criu" in path.parts or path.name.startswith("pages")
                sizes[about.st_ino] = (about.st_size, of_cpu)
    return sum(size for size, _ in sizes.values()), sum(size for size, cpu in sizes.values() if cpu)


def changed(folder: Path, before: int, after: int) -> dict[str, int]:
    """Bytes of GPU memory in use that differ between two steps, as the program wrote them down.

    `changed_bytes` are the chunks of 32 KiB, not all zeros, that hold something else than before;
    `new_bytes` those of them with contents that were nowhere before, equal ones once.
    """
    old = numpy.load(folder / f"step-{before}.npy")
    new = numpy.load(folder / f"step-{after}.npy")
    known = dict(old.tolist())
    differing = [value for address, value in new.tolist() if value and known.get(address) != value]
    contents = set(differing) - set(known.values())
    return {
        "active_bytes": len(new) * CHUNK,
        "changed_bytes": len(differing) * CHUNK,
        "new_bytes": len(contents) * CHUNK,
    }


def _pages(criu: Path) -> dict[str, tuple[Any, Any]]:
    """Pages of each address space: their numbers, ascending, and their bytes."""
    found = {}
    for path in criu.glob("pagemap-*.img"):
        name, runs = criu_images.page_runs(path)
        if runs:
            numbers = [numpy.arange(first, first + count) for first, count in runs]
            data = numpy.memmap(path.with_name(name), numpy.uint64, "r")
            found[path.name] = (numpy.concatenate(numbers), data.reshape(-1, PAGE // 8))
    return found


def changed_pages(before: Path, after: Path, place: Path) -> int:
    """Bytes of pages of CPU memory in an image that another does not have at the same address.

    `place`: for the files of pages as they were dumped.
    """
    count = 0
    with (
        TemporaryDirectory(dir=place) as old_place,
        TemporaryDirectory(dir=place) as new_place,
        plain_criu(Image(before), [Path(old_place)], "before") as old_files,
        plain_criu(Image(after), [Path(new_place)], "after") as new_files,
    ):
        old = _pages(old_files)
        for name, (numbers, data) in _pages(new_files).items():
            old_numbers, old_data = old.get(name, (numpy.empty(0, numpy.int64), data[:0]))
            _, here, there = numpy.intersect1d(numbers, old_numbers, True, True)
            count += len(numbers) - len(here)
            for at in range(0, len(here), PAGES_AT_ONCE):
                some = slice(at, at + PAGES_AT_ONCE)
                count += int((data[here[some]] != old_data[there[some]]).any(1).sum())
    return count * PAGE


def watch(job: Job, store: Path, until: float) -> list[Seen]:
    """Wait for IMAGES images. Raises Trouble if they do not come."""
    seen: list[Seen] = []
    while len(seen) < IMAGES:
        known = {one.image for one in seen}
        # One level alone: what is below a partial image is gone when that is renamed.
        for manifest in sorted(store.glob("*/manifest.json")):
            image = manifest.parent.name
            if image not in known and ".partial-" not in image:
                known.add(image)
                # What the job had said when it was stopped; it has gone on since.
                step = last_step(manifest.with_name("output.log"))
                seen.append(Seen(image, step, *stored(store)))
        if time.monotonic() > until:
            raise Trouble(f"{len(seen)} of {IMAGES} images came in time")
        if not job.live:
            raise Trouble("the job ended")
        time.sleep(LOOK_SECONDS)
    return seen


def once(bench: Bench, measured: Measured, folder: Path, number: int) -> dict[str, Any]:
    """Start the job, have images taken all few seconds, and compare. Raises Trouble."""
    store, digests = folder / "store", folder / "digests"
    every = EVERY_SECONDS_SMALL if bench.small else EVERY_SECONDS
    command = [*measured.command, "--chunk-digests", str(digests), "--step-delay", f"{every / 8}"]
    job = Job(bench.site, f"periodic-{measured.workload}-{number}", command, folder)
    try:
        job.start(bench.until(START_SECONDS))
        if not job.wait_step(FIRST_STEPS, bench.until(START_SECONDS)):
            raise Trouble("the job ended by itself")
        words = ["--every", str(every), "--keep", str(IMAGES + 1), "--store", str(store)]
        with (folder / "checkpoint.out").open("wb") as out:
            process = bench.site.start("checkpoint", job.name, *words, stdout=out, stderr=out)
            try:
                seen = watch(job, store, bench.until(IMAGES_SECONDS))
            except Trouble as trouble:
                said = (folder / "checkpoint.out").read_text(errors="replace")[-500:]
                raise Trouble(f"{trouble}: {said}") from None
            finally:
                process.terminate()
                process.wait()
    finally:
        job.kill()
    images = [{"step": seen[0].step, "written_bytes": seen[0].bytes}]
    for before, after in itertools.pairwise(seen):
        images.append(
            {
                "step": after.step,
                "written_bytes": after.bytes - before.bytes,
                "written_cpu_bytes": after.cpu_bytes - before.cpu_bytes,
                "changed_cpu_bytes": changed_pages(
                    store / before.image, store / after.image, folder
                ),
                **changed(digests, before.step, after.step),
            }
        )
    return {"images": images}


def periodic(bench: Bench) -> dict[str, Any]:
    """Images in a row of each job of the section."""

    def unit(job: Measured) -> Unit:
        def take(folder: Path, number: int) -> dict[str, Any]:
            return once(bench, job, folder, number)

        return Unit(job.workload, 1, 60.0, take, {})

    if bench.site.call("checkpoint", "--help").code != 0:
        raise Trouble("this flowgpu has no verb checkpoint")
    return measure(bench, "periodic", [unit(job) for job in bench.periodic_jobs])
