"""What holds of every report of `flowgpu report`."""

from __future__ import annotations

import xml.etree.ElementTree as ET

SVG = "svg"


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
