"""A report as one HTML file: inline SVG, no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import flowgpu
from flowgpu.render import rate, seconds, size
from flowgpu.report import charts, source
from flowgpu.report.source import Series, Shown
from flowgpu.report.svg import text
from flowgpu.timeline import JOB, PAUSED

CLOSER = 0.6
"""A pause that is a smaller part of the whole has a chart of its own."""
NAMED = 3
"""Steps that the first sentence names."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #57606a; --paper: #ffffff;
  --line: #d0d7de; --own: #2f6fbf; --ghost: #1f883d; --criu: #8250df; --task: #9a6700;
  --still: #cf4a14; --ran: #8c959f; --pause: #ffe9df; --gone: #e6e9ed; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9da7b1; --paper: #0d1117;
  --line: #30363d; --own: #539bf5; --ghost: #46b35a; --criu: #a782f0; --task: #d0a215;
  --still: #f0763f; --ran: #6e7681; --pause: #33200f; --gone: #22272e; } }
@media print { :root { color-scheme: light; --ink: #000000; --dim: #333333; --paper: #ffffff;
  --line: #bbbbbb; --own: #2f6fbf; --ghost: #1f883d; --criu: #8250df; --task: #9a6700;
  --still: #cf4a14; --ran: #8c959f; --pause: #ffe9df; --gone: #e6e9ed; }
  section { break-inside: avoid; } details { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0 .6rem; }
.answer { font-size: 1.15rem; }
.error { border-left: 4px solid var(--still); padding-left: .7rem; }
.dim, caption { color: var(--dim); text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .6rem 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.chart, .wide { overflow-x: auto; }
svg { width: 100%; min-width: 40rem; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .tick, svg .note { fill: var(--dim); font-size: 11px; }
svg .heading { font-weight: 600; fill: var(--dim); }
svg .value { font-variant-numeric: tabular-nums; }
.own { fill: var(--own); } .ghost { fill: var(--ghost); } .criu { fill: var(--criu); }
.task { fill: var(--task); } .job, .ran { fill: var(--ran); } .still { fill: var(--still); }
.bytes { fill: var(--ghost); } .gone { fill: var(--gone); } .pause { fill: var(--pause); }
.limit { fill: none; stroke: var(--ink); stroke-dasharray: 4 2; }
.grid { stroke: var(--line); }
.curve { fill: none; stroke: currentColor; stroke-width: 1.5; }
svg .dot, svg .legend { fill: currentColor; }
.job0 { color: var(--own); } .job1 { color: var(--still); } .job2 { color: var(--ghost); }
.job3 { color: var(--criu); } .job4 { color: var(--task); } .job5 { color: var(--dim); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); }
"""


def page(shown: Shown | Series) -> str:
    """The whole file."""
    body = "".join(_series(shown) if isinstance(shown, Series) else _shown(shown))
    title = text(f"FlowGPU: {shown.title}")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>{body}</main>"
        f'<footer class="dim"><p>flowgpu {text(flowgpu.__version__)}</p></footer></body></html>\n'
    )


def answer(shown: Shown) -> str:
    """Where the time went, in a sentence or two."""
    total = seconds(shown.total)
    if shown.error:
        return f"The {shown.kind} failed after {total}."
    if shown.pause is None:
        said = f"The {shown.kind} took {total}."
    else:
        said = f"The job stood still for {seconds(shown.pause)} of the {total} that this took."
    if steps := source.where_the_pause_went(shown):
        whole = sum(taken for _, taken in steps)
        parts = [f"{name}, {taken / whole:.0%}" for name, taken in steps[:NAMED]]
        said += f" Most of the pause: {'; '.join(parts)}."
    return said


def _shown(shown: Shown, level: str = "h1") -> Iterator[str]:
    yield f"<header><{level}>{text(shown.title)}</{level}>"
    yield f'<p class="answer">{text(answer(shown))}</p>'
    if shown.error:
        yield f'<p class="error">{text(shown.error)}</p>'
    yield "</header>"
    if steps := source.where_the_pause_went(shown):
        told = "<p>What was waited for while the job stood still.</p>"
        taken_by = [(name, seconds(taken)) for name, taken in steps]
        chart = charts.where_it_went(steps, "went")
        yield _section("Where the pause went", told, chart, ("step", "time"), taken_by)
    if shown.timeline is not None:
        yield _timeline(shown)
    elif shown.phases:
        told = "This image says how long each phase took, not when. Phases overlap."
        chart = charts.durations(list(shown.phases.items()), "phases")
        yield _section("What each phase took", f"<p>{told}</p>", chart, (), [])
    if shown.stages:
        linked = (
            f" {size(shown.linked)} more are shared with earlier images." if shown.linked else ""
        )
        told = f"<p>{text('What of the GPU memory was stored, and why not the rest.' + linked)}</p>"
        rows = [(name, size(amount), str(amount)) for name, amount in shown.stages]
        chart = charts.funnel(shown.stages, "funnel")
        yield _section("GPU memory, from reserved to stored", told, chart, ("", "", "bytes"), rows)
    if shown.movements:
        limits = [
            (
                one.what,
                rate(one.bytes / one.seconds),
                rate(one.limit) if one.limit else "not known",
                one.source,
            )
            for one in shown.movements
        ]
        columns = ("what", "moved at", "limit", "which limit, by whom")
        chart = charts.speeds(shown.movements, "speeds")
        sources = "".join(
            f"<p>{text(one.what)}: {text(one.source)}.</p>" for one in shown.movements
        )
        yield _section("How fast the bytes moved", sources, chart, columns, limits)
    facts = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in shown.facts)
    yield f"<section><h2>What it was</h2><dl>{facts}</dl></section>"


def _timeline(shown: Shown) -> str:
    line = shown.timeline
    if line is None:
        return ""
    told = "Each row is a step, from its begin to its end. In the shaded part the job stood still."
    if shown.pause is None:
        told = "Each row is a step, from its begin to its end. The job runs once all is done."
    if line.left_out:
        told += f" {line.left_out} spans were too many to be noted."
    rows = [
        (one.track, one.name, f"{one.begin:.4f} s", seconds(one.seconds), _bytes(one.bytes))
        for one in line.spans
    ]
    columns = ("who", "what", "begin", "time", "bytes")
    chart = charts.gantt(line, "gantt")
    whole = _section("When each did what", f"<p>{text(told)}</p>", chart, columns, rows)
    pauses = line.find(JOB, PAUSED)
    if len(pauses) != 1 or pauses[0].seconds > CLOSER * line.seconds:
        return whole
    begin, end = pauses[0].begin, pauses[0].end
    closer = charts.gantt(line, "closer", begin, end)
    told = "<p>The shaded part of the chart above, from its own begin on.</p>"
    return whole + _section("The pause, closer", told, closer, (), [])


def _series(series: Series) -> Iterator[str]:
    rows = series.rows
    yield f"<header><h1>{text(series.title)}</h1>"
    own = sum(row.own for row in rows)
    longest = max(rows, key=lambda row: row.pause, default=None)
    if longest is not None:
        said = f"{len(rows)} images. The longest pause was {seconds(longest.pause)}, "
        said += f"at {longest.name}; the newest {seconds(rows[-1].pause)}."
        yield f'<p class="answer">{text(said)}</p>'
    for name, error in series.damaged:
        yield f'<p class="error">{text(name)}: {text(error)}</p>'
    yield "</header>"
    if rows:
        cells = [
            (
                row.name,
                row.job,
                seconds(row.pause),
                seconds(row.total),
                size(row.bytes),
                size(row.own),
            )
            for row in rows
        ]
        columns = ("image", "job", "pause", "in all", "size", "own")
        told = (
            f"<p>What an image has of its own is freed when it is removed: {size(own)} in all.</p>"
        )
        chart = charts.pauses(series, "pauses")
        yield _section("Pause over time", told, chart, columns, cells)
    if series.newest is not None:
        yield from _shown(series.newest, "h2")


def _section(
    name: str, told: str, chart: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A chart, and the same as a table, for who cannot see it."""
    table = ""
    if rows:
        head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
        lines = "".join(
            "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        table = (
            '<details><summary>As a table</summary><div class="wide"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>"
        )
    return f'<section><h2>{text(name)}</h2>{told}<div class="chart">{chart}</div>{table}</section>'


def _bytes(amount: int) -> str:
    return size(amount) if amount else ""
