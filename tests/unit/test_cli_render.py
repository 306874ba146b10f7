"""Units, tables and progress."""

from __future__ import annotations

import io
import re

import pytest

from flowgpu import render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was written, without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


@pytest.fixture(autouse=True)
def terminal_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (int(1.46 * 2**30), "1.46 GiB"),
        (9.999 * 2**20, "10.0 MiB"),
        (50.7 * 2**30, "50.7 GiB"),
        (890 * 2**20, "890 MiB"),
        (5 * 2**60, "5120 PiB"),
    ],
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert render.size(count) == text


def test_rates_and_times() -> None:
    assert [render.rate(r) for r in (54.2e9, 3e6, 1500)] == ["54.2 GB/s", "3.0 MB/s", "2 kB/s"]
    assert [render.seconds(s) for s in (0.81, 0.0351, 12)] == ["0.81 s", "35 ms", "12.00 s"]
    assert [render.age(a) for a in (-1, 119, 120, 7200, 86400 * 3)] == [
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "3 d",
    ]


def test_a_table_for_a_program_is_aligned_and_never_cut() -> None:
    out = io.StringIO()
    render.table(["A", "LONG"], [["x" * 300, "1"], ["y", "2"]], out)
    assert out.getvalue().splitlines() == [
        "A" + " " * 301 + "LONG",
        "x" * 300 + "  1",
        "y" + " " * 301 + "2",
    ]


def test_a_table_on_a_terminal_fits_it_and_takes_cells_as_they_are() -> None:
    out = Terminal()
    render.table(["A", "COMMAND"], [["[red]x[/red]", "y" * 300]], out)
    lines = out.text().splitlines()
    assert len(lines) == 2
    assert "[red]x[/red]" in lines[1]
    assert max(map(len, lines)) <= 100


def test_an_outline_shows_units_and_nesting() -> None:
    data = {
        "job": "train",
        "image_bytes": 1 << 30,
        "none": None,
        "phases": {"gate_seconds": 0.5},
        "command": ["python", "x.py"],
        "tasks": [{"pid": 1, "threads": 2}, {"pid": 3, "threads": 4}],
        "empty": [],
    }
    assert list(render.outline(data)) == [
        "job:         train",
        "image_bytes: 1.00 GiB (1073741824)",
        "none:        -",
        "phases:",
        "  gate_seconds: 0.50 s",
        "command:     python x.py",
        "tasks:",
        "  - pid:     1",
        "    threads: 2",
        "  - pid:     3",
        "    threads: 4",
        "empty:       -",
    ]


def test_progress_for_a_program_is_a_line_a_phase_and_one_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with render.Progress(out) as progress:
        progress({"phase": "gate"})
        for step in range(5):
            progress({"phase": "copy", "done": step << 30, "total": 4 << 30, "rate": 1e9})
            now[0] += 1.0
        for _ in range(2):  # over when it is first heard of
            progress({"phase": "seal", "done": 1 << 30, "total": 1 << 30, "rate": 0.0})
        progress({"phase": "commit"})
    assert out.getvalue().splitlines() == [
        "flowgpu: copy 0 B of 4.00 GiB, 1.0 GB/s",
        "flowgpu: copy 2.00 GiB of 4.00 GiB, 1.0 GB/s",
        "flowgpu: copy 4.00 GiB of 4.00 GiB, 1.0 GB/s",
    ]


def test_progress_for_a_program_names_a_phase_without_bytes_that_takes_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render, "PLAIN_SECONDS", 0.0)
    out = io.StringIO()
    with render.Progress(out) as progress:
        progress({"phase": "gate"})
        progress._later.join()
        progress({"phase": "gate"})  # it goes on
        monkeypatch.setattr(render, "PLAIN_SECONDS", 1e6)
        progress({"phase": "criu"})
        progress({"phase": "commit"})
    assert out.getvalue().splitlines() == ["flowgpu: gate"]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    out = Terminal()
    with render.Progress(out) as progress:
        progress({"phase": "gate"})
        progress({"phase": "copy", "done": 1 << 30, "total": 4 << 30, "rate": 1e9})
        assert progress._bars
        progress._bars.refresh()
    assert "copy" in out.text()
    assert "1.00 GiB of 4.00 GiB, 1.0 GB/s" in out.text()
    assert "0:00:00" in out.text()  # for how long
    # The last thing written erases the lines of the bars.
    assert out.getvalue().endswith("\x1b[2K")


def test_progress_can_be_closed_twice() -> None:
    out = Terminal()
    with render.Progress(out) as progress:
        progress.close()
        written = out.getvalue()
    assert out.getvalue() == written


def test_a_funnel_shows_what_is_left_after_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    render.funnel([("reserved", 4 << 30), ("active", 1 << 30), ("stored", 1), ("gone", 0)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["reserved", "4.00", "GiB", "100.0%", 40 * "#"]
    assert lines[2].split() == ["active", "1.00", "GiB", "25.0%", 10 * "#"]
    assert lines[3].split() == ["stored", "1", "B", "0.0%"]
    assert lines[4].split() == ["gone", "0", "B", "0.0%"]
    render.funnel([("reserved", 0), ("active", 0)])
    assert "0 B" in capsys.readouterr().out


def test_a_funnel_on_a_terminal_is_drawn() -> None:
    screen = Terminal()
    render.funnel([("reserved", 80), ("stored", 41)], screen)
    assert 40 * "━" in screen.text() and 20 * "━" + "╸" in screen.text()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_row_is_one_line_whatever_is_in_it(kind: type[io.StringIO]) -> None:
    out = kind()
    render.table(["A", "COMMAND"], [["x", "b\n\x1b[2J\udcff"], ["y", "é"]], out)
    text = out.text() if isinstance(out, Terminal) else out.getvalue()
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["x", r"b\n\x1b[2J\udcff"],
        ["y", "é"],
    ]


def test_a_stream_without_a_letter_gets_an_escape_for_it() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    render.take_any_text(stream, None)
    print("é", file=stream, flush=True)
    assert written.getvalue() == b"\\xe9\n"
