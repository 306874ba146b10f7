"""When each step began and ended: what is noted is read again, and nothing else is."""

from __future__ import annotations

import json
import math
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flowgpu import timeline
from flowgpu.errors import ImageDamaged
from flowgpu.host import pcie
from flowgpu.image import layout
from flowgpu.image.manifest import Manifest
from flowgpu.image.reader import Image
from flowgpu.image.writer import ImageWriter
from flowgpu.timeline import COORDINATOR, GHOST, MOST_SPANS, MOVE, Recorder, Timeline, of_task

GOLDEN = Path(__file__).parents[1] / "golden" / "image-v2"
WHOLE = {"began": 1.0, "spans": [[GHOST, MOVE, 0.5, 1.5, 8]], "limits": [], "left_out": 0}


def image_with(folder: Path, data: bytes) -> Image:
    """An image with this timeline."""
    golden = Manifest.load(GOLDEN)
    with ImageWriter(folder / "image", sync=False) as writer:
        shutil.copytree(GOLDEN, writer.path, dirs_exist_ok=True)
        (writer.path / layout.MANIFEST).unlink()
        (writer.path / layout.TIMELINE).write_bytes(data)
        fields = vars(golden) | {"files": writer.seal(), "total_seconds": 4.0}
        writer.commit(Manifest(**fields))
    return Image(folder / "image")


def test_what_is_noted_is_read_again() -> None:
    began = time.monotonic() - 10.0
    recorder = Recorder(began)
    recorder.add(GHOST, MOVE, began + 1.0, began + 3.0, 100)
    found = Timeline.from_json(json.loads(json.dumps(recorder.to_json())), 10.0)
    (span,) = found.spans
    assert (span.track, span.name, span.bytes) == (GHOST, MOVE, 100)
    assert (span.begin, span.end, span.rate) == pytest.approx((1.0, 3.0, 50.0))
    assert found.began == pytest.approx(time.time() - 10.0, abs=1.0)
    assert found.seconds == pytest.approx(3.0)


def test_what_has_not_ended_ends_with_the_whole() -> None:
    recorder = Recorder()
    recorder.begin(COORDINATOR, "commit")
    (span,) = Timeline.from_json(recorder.to_json(), 7.0).spans
    assert span.end == 7.0


def test_the_first_end_counts_and_a_failure_ends_a_span() -> None:
    recorder = Recorder()
    span = recorder.begin(GHOST, MOVE)
    span.end(5, span.began + 1.0)
    span.end(9, span.began + 2.0)
    with pytest.raises(OSError), recorder.span(of_task(7), "gate"):
        raise OSError
    answer: Future[int] = Future()
    recorder.until(answer, GHOST, "copy")
    answer.set_exception(OSError())
    rows = recorder.to_json()["spans"]
    assert [row[1] for row in rows] == [MOVE, "gate", "copy"]
    assert rows[0][4] == 5
    assert all(row[3] is not None for row in rows)


def test_spans_that_are_too_many_are_counted() -> None:
    recorder = Recorder()
    for _ in range(MOST_SPANS + 3):
        recorder.add(GHOST, "import", 0.0, 0.0)
    found = Timeline.from_json(recorder.to_json(), 1.0)
    assert (len(found.spans), found.left_out) == (MOST_SPANS, 3)


def test_an_image_from_before_has_none_and_a_new_one_has_it(tmp_path: Path) -> None:
    assert timeline.of_image(Image(GOLDEN)) is None
    found = timeline.of_image(image_with(tmp_path, json.dumps(WHOLE).encode()))
    assert found is not None
    assert [span.bytes for span in found.spans] == [8]


BAD: list[Any] = [
    [],
    {},
    WHOLE | {"spans": [[GHOST, MOVE, 1.0]]},
    WHOLE | {"spans": [[GHOST, MOVE, 2.0, 1.0, 0]]},
    WHOLE | {"spans": [[GHOST, MOVE, -1.0, 1.0, 0]]},
    WHOLE | {"spans": [[GHOST, MOVE, 0.0, math.nan, 0]]},
    WHOLE | {"spans": [[GHOST, MOVE, 0.0, 1.0, math.inf]]},
    WHOLE | {"spans": [[GHOST, MOVE, None, 1.0, 0]]},
    WHOLE | {"began": "now"},
    WHOLE | {"limits": [["GPU"]]},
]


@pytest.mark.parametrize("data", [b"{", *(json.dumps(bad).encode() for bad in BAD)])
def test_one_that_is_not_whole_is_damage(tmp_path: Path, data: bytes) -> None:
    image = image_with(tmp_path, data)
    with pytest.raises(ImageDamaged, match=r"timeline\.json"):
        timeline.of_image(image)
    (tmp_path / "of-a-job").write_bytes(data)
    assert timeline.read(tmp_path / "of-a-job") is None


def test_other_bytes_than_those_that_were_written_are_damage(tmp_path: Path) -> None:
    image = image_with(tmp_path, json.dumps(WHOLE).encode())
    path = image.path / layout.TIMELINE
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.6"))
    with pytest.raises(ImageDamaged, match="does not have its digest"):
        timeline.of_image(image)


def test_a_job_has_its_newest_operation_and_lives_without_it(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.begin(COORDINATOR, "gate")
    timeline.note(tmp_path / "timeline.json", "checkpoint", recorder, {"job": "a"}, "it failed")
    found = timeline.read(tmp_path / "timeline.json")
    assert found is not None
    assert (found.kind, found.result, found.error) == ("checkpoint", {"job": "a"}, "it failed")
    assert found.timeline.spans[0].end > 0
    timeline.note(tmp_path / "no" / "folder", "restore", recorder, {}, "")
    assert timeline.read(tmp_path / "no" / "folder") is None


@pytest.mark.parametrize(
    ("speed", "width", "what", "rate"),
    [
        ("32.0 GT/s PCIe", "16", "PCIe 5.0 x16", 63.0e9),
        ("16.0 GT/s PCIe", "8", "PCIe 4.0 x8", 15.75e9),
        ("5.0 GT/s PCIe", "16", "PCIe 2.0 x16", 8.0e9),
    ],
)
def test_a_link_is_as_fast_as_its_generation_and_lanes(
    tmp_path: Path, speed: str, width: str, what: str, rate: float
) -> None:
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text(f"{speed}\n")
    (folder / "current_link_width").write_text(f"{width}\n")
    found = pcie.link("0000:1B:00.0", tmp_path)
    assert found is not None
    assert found[0] == pytest.approx(rate, rel=0.01)
    assert found[1:] == (what, f"{folder}/max_link_speed")


@pytest.mark.parametrize("speed", ["Unknown", "", "7.5 GT/s"])
def test_a_link_that_the_kernel_does_not_know_is_not_known(tmp_path: Path, speed: str) -> None:
    assert pcie.link("0000:1b:00.0", tmp_path) is None
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "max_link_speed").write_text(speed)
    (tmp_path / "0" / "current_link_width").write_text("16")
    assert pcie.link("0", tmp_path) is None
