"""What holds of every report of `flowgpu report`, and of every trace of `flowgpu trace`."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

SVG = "svg"
ROUNDING = 2e-3
"""In microseconds: places of spans are rounded."""


def parse(html: str) -> ET.Element:
    """The page, which is XML as well; the parser finds what is not closed or not escaped."""
    return ET.fromstring(html)


def words(html: str) -> str:
    return " ".join(parse(html).itertext())


def check(html: str) -> ET.Element:
    """What holds of every report."""
    root = parse(html)
    assert not [one for one in root.iter() if one.tag in ("script", "link", "img", "iframe")]
    attributes = [(one.tag, name) for one in root.iter() for name in one.attrib]
    assert not [pair for pair in attributes if pair[1] in ("src", "href") or pair[1][:2] == "on"]
    assert "url(" not in html and "@import" not in html and "://" not in html
    ids = [one.attrib["id"] for one in root.iter() if "id" in one.attrib]
    assert len(ids) == len(set(ids))
    drawings = list(root.iter(SVG))
    for drawing in drawings:
        assert drawing.attrib["role"] == "img"
        assert set(drawing.attrib["aria-labelledby"].split()) <= set(ids)
        assert drawing[0].tag == "title" and drawing[0].text
        assert drawing[1].tag == "desc"
        width, height = map(float, drawing.attrib["viewBox"].split()[2:])
        for bar in drawing.iter("rect"):
            x, y, wide, high = (float(bar.attrib[k]) for k in ("x", "y", "width", "height"))
            assert x >= 0 and x + wide <= width + 2 and y >= 0 and y + high <= height + 1
    assert root.attrib["lang"] == "en"
    assert root.find("head/title") is not None
    assert len(list(root.iter("h1"))) == 1
    return root


def check_trace(trace: dict[str, Any]) -> None:
    """The rules of the Trace Event Format, as far as viewers insist on them."""
    json.dumps(trace, allow_nan=False)
    rows = trace["traceEvents"]
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in rows:
        assert row["ph"] in ("X", "M", "C")
        assert isinstance(row["name"], str) and row["name"]
        assert type(row["pid"]) is int
        if row["ph"] == "M":
            place = (row["pid"], row["tid"])
            if row["name"] in named:
                assert isinstance(row["args"]["name"], str)
                assert place not in named[row["name"]]
                named[row["name"]].add(place)
            continue
        assert math.isfinite(row["ts"]) and row["ts"] >= 0
        if row["ph"] == "C":
            assert all(isinstance(value, int | float) for value in row["args"].values())
            continue
        assert type(row["tid"]) is int
        assert math.isfinite(row["dur"]) and row["dur"] >= 0
        threads.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["dur"]))
    assert set(threads) <= named["thread_name"]
    assert {pid for pid, _ in threads} <= {pid for pid, _ in named["process_name"]}
    for spans in threads.values():
        open_ends: list[float] = []
        assert all(a[0] <= b[0] for a, b in pairwise(spans))
        for begin, length in spans:
            while open_ends and open_ends[-1] <= begin + ROUNDING:
                open_ends.pop()
            assert not open_ends or begin + length <= open_ends[-1] + ROUNDING
            open_ends.append(begin + length)
