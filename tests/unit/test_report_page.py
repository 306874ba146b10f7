"""`flowgpu report`: one file that needs nothing else, and says what the data says."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from report_lib import SVG, check, words
from store_lib import write

from flowgpu.image import layout
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Registry
from flowgpu.report import source
from flowgpu.report.page import answer, page
from flowgpu.report.source import Movement, NothingToShow, Row, Series, Shown
from flowgpu.report.svg import ticks
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, MOVE, PAUSED, Span, Timeline

GOLDEN = Path(__file__).parents[1] / "golden" / "image-v2"
HOSTILE = "</svg><script>alert('\x1b[31m&quot;')</script>"

SPANS = (
    Span(COORDINATOR, "prepare", 0.0, 2.0),
    Span(JOB, PAUSED, 2.1, 3.0),
    Span(COORDINATOR, "gate", 2.0, 2.2),
    Span(COORDINATOR, "capture", 2.2, 2.8),
    Span(CRIU, "dump", 2.2, 2.5),
    Span(GHOST, MOVE, 2.2, 2.7, 1 << 30),
    Span("task 7", "gate", 2.0, 2.2),
    Span(COORDINATOR, "open", 2.8, 3.0),
    Span(COORDINATOR, "commit", 3.0, 4.0),
)
SHOWN = Shown(
    title="an image",
    kind="checkpoint",
    facts=[("job", "train")],
    timeline=Timeline(0.0, SPANS),
    phases={},
    pause=0.9,
    total=4.0,
    stages=[("reserved", 8), ("active", 4), ("nonzero", 4), ("distinct", 2), ("stored", 0)],
    movements=[Movement("GPU memory", 1 << 30, 0.5, 0.0, "not known: no link")],
)


def test_a_report_needs_nothing_but_itself() -> None:
    root = check(page(SHOWN))
    assert len(list(root.iter(SVG))) == 5


def test_what_the_pause_was_spent_on_adds_up_to_the_pause() -> None:
    steps = dict(source.where_the_pause_went(SHOWN))
    assert sum(steps.values()) == pytest.approx(0.9)
    assert steps[source.CPU] == pytest.approx(0.3)
    assert steps[source.COPY] == pytest.approx(0.2)  # what the job waited for it alone
    assert steps[source.REST] == pytest.approx(0.1)
    assert steps["stop at the gate"] == pytest.approx(0.1)  # the job ran at first
    assert next(iter(steps)) == source.CPU


def test_the_first_sentence_says_where_the_time_went() -> None:
    said = answer(SHOWN)
    assert said.startswith("The job stood still for 0.90 s of the 4.00 s that this took.")
    assert "write CPU memory (CRIU), 33%" in said
    assert said in words(page(SHOWN))


def test_a_limit_that_nobody_knows_is_not_drawn() -> None:
    html = page(SHOWN)
    assert "not known: no link" in html
    assert 'class="limit"' not in html
    known = Movement("GPU memory", 1 << 30, 0.5, 50e9, "PCIe 5.0 x16")
    html = page(dataclasses.replace(SHOWN, movements=[known]))
    assert 'class="limit"' in html
    assert "50.0 GB/s, 4% of it" in html


def test_names_in_an_image_are_text_in_the_page() -> None:
    spans = (*SPANS, Span(HOSTILE, HOSTILE, 0.0, 1.0))
    facts = [(HOSTILE, HOSTILE)]
    line = Timeline(0.0, spans)
    shown = dataclasses.replace(SHOWN, title=HOSTILE, facts=facts, timeline=line, error=HOSTILE)
    check(page(shown))


def test_many_tasks_share_rows() -> None:
    tasks = [Span(f"task {pid}", "gate", 2.0, 2.2) for pid in range(1, 301)]
    shown = dataclasses.replace(SHOWN, timeline=Timeline(0.0, (*SPANS, *tasks)))
    root = check(page(shown))
    assert "tasks more" not in words(page(SHOWN))
    assert "288 tasks more" in " ".join(root.itertext())


def test_an_image_from_before_shows_what_it_knows(tmp_path: Path) -> None:
    root = check(page(source.find(str(GOLDEN), Registry(tmp_path))))
    said = " ".join(root.itertext())
    assert "This image says how long each phase took, not when." in said
    for phase in Image(GOLDEN).manifest.phases:
        assert phase in said


def test_a_failure_is_told() -> None:
    failed = dataclasses.replace(SHOWN, pause=None, error="the disk is full", stages=())
    assert answer(failed) == "The checkpoint failed after 4.00 s."
    assert "the disk is full" in words(page(failed))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "store")
    base = None
    for _ in range(3):
        image = found.next_image()
        write(image, [[1, 2, 0]], base, "a" * 12)
        base = image
    return found


def test_a_store_shows_each_image_and_names_what_is_damaged(store: Store, tmp_path: Path) -> None:
    first = store.names()[0]
    (store.path / first / layout.MANIFEST).write_bytes(b"{")
    found = source.find(str(store.path), Registry(tmp_path))
    assert isinstance(found, Series)
    html = page(found)
    root = check(html)
    assert [row.name for row in found.rows] == store.names()[1:]
    assert [name for name, _ in found.damaged] == [first]
    dots = [one for one in root.iter("circle") if one.attrib["class"].startswith("dot")]
    assert len(dots) == 2
    assert "2 images." in words(html)
    shutil.rmtree(store.path / store.names()[1])
    shutil.rmtree(store.path / store.names()[1])
    check(page(source.find(str(store.path), Registry(tmp_path))))  # nothing but a damaged one


def test_images_of_one_moment_and_without_a_pause_are_drawn() -> None:
    row = Row("000001", "a", datetime(2026, 1, 1, tzinfo=UTC), 0.0, 0.0, 0, 0)
    check(page(Series("store", [row, dataclasses.replace(row, job="b")], [], None)))


def test_there_is_nothing_to_show_of_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingToShow):
        source.find(str(tmp_path / "empty"), Registry(tmp_path))


@pytest.mark.parametrize("end", [0.0, 1e-6, 0.0123, 0.9, 1.0, 7.3, 600.0, 1e5])
def test_ticks_are_few_and_round(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0.0 and found[-1] <= end * (1 + 1e-6)
    assert len(found) <= 9
    assert end == 0 or len(found) >= 4
