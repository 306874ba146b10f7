#!/usr/bin/env python3
"""Draw the chart of docs/reading-a-report.md, from the timeline of a dump on the emulated GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flowgpu.report import charts, page  # noqa: E402
from flowgpu.timeline import Timeline  # noqa: E402

RECORDED = ROOT / "tests" / "golden" / "timeline.json"
TOTAL_SECONDS = 1.654
"""What the image of that timeline says of the whole."""


def main() -> None:
    timeline = Timeline.from_json(json.loads(RECORDED.read_text()), TOTAL_SECONDS)
    drawing = charts.gantt(timeline, "gantt")
    head = '<svg xmlns="http://www.w3.org/2000/svg" style="background: var(--paper)" '
    style = f"<style>{page.STYLE}svg {{ min-width: 0; }}</style>"
    drawing = drawing.replace("<svg ", head, 1).replace("<title", f"{style}<title", 1)
    (ROOT / "docs" / "report.svg").write_text(drawing.replace("><", ">\n<") + "\n")


if __name__ == "__main__":
    main()
