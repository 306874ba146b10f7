"""Sum results up into bench/results/<machine>/<kind>.json, the only results that git keeps.

    python -m bench.summary FILE.json...    rewrite the summary of each file's machine and kind

A file is what a measurement has written with `--out`, row by row. Those files stay where they were
written, in build/results for the targets of the Makefile. A summary has what the pages of docs
show, and the digest of the file that it is of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import report
from bench.machine import ROOT

RESULTS = ROOT / "bench" / "results"
RAW = ROOT / "build" / "results"
LARGEST, LARGEST_OF_ALL = 50_000, 1_000_000
SHOWN = 12
Document = dict[str, Any]

# What the tables and plots of a checkpoint, a study or a repeated image read.
RUN_KEYS = (
    *("pause_seconds", "phases", "next_step_seconds", "restore_phases", "image_bytes", "cpu_bytes"),
    *("gpu_bytes_reserved", "gpu_bytes_stored", "dump_copy_gbs", "restore_copy_gbs", "identical"),
    *("images", "axis", "value", "failed"),
)
IMAGE_KEYS = (
    *("active_bytes", "changed_bytes", "changed_cpu_bytes", "written_bytes", "written_cpu_bytes"),
)
HEADING = (
    "kind",
    "date",
    "lane",
    "gpu",
    "driver",
    "engine",
    "command",
    "commit",
    "machine",
    "note",
)


def slug(gpu: str) -> str:
    """The folder of a machine, by the name of its GPU: `nvidia-h100`, `emulated`."""
    return "-".join(re.findall(r"[a-z0-9]+", gpu.lower())[:2])


def gpu_of(document: Document) -> str:
    """The name of the GPU that the results are of."""
    for name in (document.get("lane"), document.get("restored_on"), document.get("gpu")):
        name = name["gpu"] if isinstance(name, dict) else name
        if name and name != "nvidia":
            return str(name).partition(",")[0]
    return "emulated" if document.get("kind") == "interpreter" else "nvidia"


def name_of(document: Document) -> str:
    """What the summary is called: the kind, and the engine where each has its own."""
    if "sections" in document:
        return "bench"
    if "runs" in document:
        return "campaign" if "workloads" in document["runs"][0] else "live-restores"
    if "kernels" in document:
        return "mover"
    kind = str(document["kind"])
    if kind == "support":
        return f"{kind}-{document.get('engine', 'native')}"
    if kind in ("faults", "storm", "soak"):
        _, *more = document["lane"].split(", ")
        engine = "replay" if "replay" in more else "native"
        return "-".join([kind, engine, *(["restores"] if "restores" in more else [])])
    return kind


def heading(document: Document) -> Document:
    return {key: document[key] for key in HEADING if key in document}


def _faults(document: Document, before: Document) -> Document:
    from tests.faults.matrix import RIGHT

    rows = document["rows"]
    fired: dict[str, Counter[str]] = {}
    for row in rows:
        fired.setdefault(row["fault"], Counter())[row["action"]] += 1
    outcomes = Counter((row["verdict"], row["error"], row["exit_code"]) for row in rows)
    return {
        **{key: document[key] for key in ("seconds", "faults", "left_out") if key in document},
        "runs": len(rows),
        "fired": {fault: dict(counts) for fault, counts in fired.items()},
        "outcomes": [[*outcome, count] for outcome, count in sorted(outcomes.items())],
        "wrong": [row for row in rows if row["verdict"] not in RIGHT],
    }


def _storm(document: Document, before: Document) -> Document:
    from tests.faults.storm import VERDICTS

    rows = document["rows"]
    wrong = [row for row in rows if row["verdict"] not in VERDICTS]
    counts = Counter((row["action"], row["target"], row["verdict"]) for row in rows)
    hits = sum(row["verdict"] != "not hit" for row in rows)
    of_all = before.get("of_all", {"storms": 0, "rounds": 0, "hits": 0, "wrong": 0})
    own = {"storms": 1, "rounds": len(rows), "hits": hits, "wrong": len(wrong)}
    return {
        "seconds": document["seconds"],
        "device_bytes_lost": document["device_bytes_lost"],
        **{key: own[key] for key in ("rounds", "hits")},
        "outcomes": [[*outcome, count] for outcome, count in sorted(counts.items())],
        "errors": dict(sorted(Counter(row["error"] for row in rows if row["error"]).items())),
        "wrong": wrong,
        "of_all": {key: of_all[key] + own[key] for key in own},
    }


def _soak(document: Document, before: Document) -> Document:
    from tests.faults import soak_page

    growing = soak_page.grown(document)
    parts: Document = {}
    for name, samples in document["parts"].items():
        found: Document = {"samples": len(samples), "grows": growing[name]}
        for key in soak_page.NAMES:
            if key in samples[0]:
                values = soak_page.series(samples, key)
                gain, _ = soak_page.growth_of(samples, key)
                found[key] = [values[0], statistics.median(values), values[-1], gain]
        parts[name] = found
    summed = {"seconds": document["seconds"], "steps": document["steps"], "parts": parts}
    return summed | {"beside_new": soak_page.beside_new(document)}


def _kernels(document: Document, before: Document) -> Document:
    rows = document["rows"]
    right = [row for row in rows if not row["error"]]
    nearest = sorted(right, key=lambda row: -max(out["share"] for out in row["outputs"]))
    return {
        "kernels": len(rows),
        "equal": sum(not any(out["ulps"] for out in row["outputs"]) for row in right),
        "wrong": [row for row in rows if row["error"]],
        "nearest": [{"case": row["case"], "outputs": row["outputs"]} for row in nearest[:SHOWN]],
    }


def _support(document: Document, before: Document) -> Document:
    """The newest outcome of each case; one that was not run there says nothing of the case."""
    about = {key: document.get(key) for key in ("date", "gpu", "driver", "command", "commit")}
    runs = [*before.get("runs", []), about | {"outcomes": document["outcomes"]}]
    kept: list[Document] = []
    told: set[str] = set()
    for not_run in (False, True):
        for run in reversed(runs):
            outcomes = {
                case: outcome
                for case, outcome in run["outcomes"].items()
                if case not in told and (outcome[0] == "not run") == not_run
            }
            told |= outcomes.keys()
            if outcomes:
                kept.insert(0, run | {"outcomes": outcomes})
    return {"runs": kept}


def _campaign(document: Document, before: Document) -> Document:
    """Every run, in a line each: how many workloads were dumped how often, and what was wrong."""
    runs = [run for run in before.get("runs", []) if run["of"] != document["sha256"]]
    for run in (run for run in document["runs"] if "plan" in run):
        plan, workloads = run["plan"], [one for one in run["workloads"] if one["runs"]]
        runs.append(
            {
                "of": document["sha256"],
                "date": document["date"],
                "commit": run.get("commit", document.get("commit")),
                "engine": plan.get("engine") or "native",
                "leave_running": plan["leave_running"],
                "seed": plan["seed"],
                "workloads": sorted(one["workload"] for one in workloads),
                "dumps": sum(len(one["dumps"]) for one in workloads),
                "restores": sum(len(one["restores"]) for one in workloads),
                "unfinished": sorted(one["workload"] for one in workloads if not one["ok"]),
                "other_output": sorted(
                    one["workload"] for one in workloads if one["identical"] is False
                ),
            }
        )
    return {"kind": "campaign", "runs": runs}


def _engine_steps(document: Document, before: Document) -> Document:
    """Medians of each job by each engine; a job that was not measured again keeps its own."""
    jobs: Document = dict(before.get("jobs", {}))
    for name, rows in document["jobs"].items():
        jobs[name] = {"date": document["date"], "commit": document["commit"]}
        for engine in dict.fromkeys(row.get("engine", "replay") for row in rows):
            of_engine = [row for row in rows if row.get("engine", "replay") == engine]
            found: Document = {"rounds": len(of_engine)}
            for key, words in (
                ("pause_seconds", ("dump", "pause_seconds")),
                ("strip_seconds", ("dump", "phases", "strip")),
                ("criu_seconds", ("dump", "phases", "criu")),
                ("restore_seconds", ("restore", "restore_seconds")),
                ("engine_seconds", ("restore", "phases", "engine")),
                ("cpu_bytes", ("dump", "cpu_bytes")),
                ("image_bytes", ("dump", "image_bytes")),
            ):
                found[key] = statistics.median(_at(row, words) for row in of_engine)
            for request in ("strip", "rebuild"):
                steps = {step for row in of_engine for step in row.get(request, {})}
                found[f"{request}_ms"] = {
                    step: statistics.median(row[request].get(step, 0.0) for row in of_engine)
                    for step in sorted(steps)
                }
            jobs[name][engine] = found
    return {"jobs": jobs}


def _at(row: Document, words: Iterable[str]) -> float:
    value: Any = row
    for word in words:
        value = value[word]
    return float(value)


def _shares(document: Document, before: Document) -> Document:
    under = [row for row in document["processes"] if row["variant"] == "flowgpu"]
    taken: Counter[str] = Counter()
    for row in under:
        taken.update({k: v / len(under) for k, v in row["functions_us_a_step"].items()})
    keys = ("job", "engine", "share_mean", "share_interval", "ours_us_a_step", "step_seconds")
    return {key: document[key] for key in keys} | {
        "processes": len(document["processes"]),
        "functions_us_a_step": dict(taken.most_common(SHOWN)),
    }


def _bench(document: Document, before: Document) -> Document:
    """Each section, and in it each job, as it was measured last."""
    sections: Document = dict(before.get("sections", {}))
    rates = document["sections"].get("rates", {})
    when = f"{document['date']} at {(document['commit'] or 'unknown')[:12]}"
    for name, section in document["sections"].items():
        own = {key: section[key] for key in section if key not in ("seconds", "jobs")}
        kept = sections.get(name, {})
        commands = [*kept.get("commands", []), *own.get("commands", [])]
        if "command" in own:
            commands.append(own.pop("command"))
        own["commands"] = list(
            dict.fromkeys(" ".join(c) if isinstance(c, list) else c for c in commands)
        )
        jobs, taken = dict(kept.get("jobs", {})), dict(kept.get("taken", {}))
        for job, found in section.get("jobs", {}).items():
            if isinstance(found, list):
                jobs[job] = [_run(run, rates, name in report.NAMES) for run in found]
            else:
                parts = jobs.get(job, {}).get("parts", {}) | {
                    part: report.summed(of) | {"taken": when}
                    for part, of in found.get("parts", {}).items()
                }
                summed = report.summed(found) | {"taken": when}
                # One pair, which some calls make only for their parts, says nothing by itself.
                if summed["pairs"] == 1 and jobs.get(job, {}).get("pairs", 0) > 1:
                    summed = jobs[job]
                jobs[job] = summed | {"parts": parts}
            taken[job] = when
        sections[name] = own | ({"jobs": jobs, "taken": taken} if jobs else {"taken": {"": when}})
    return {
        "format": document["format"],
        "kind": document["kind"],
        "gpu": document["gpu"],
        "sections": sections,
    }


def _run(run: Document, rates: Document, with_phases: bool) -> Document:
    kept = {key: run[key] for key in RUN_KEYS if key in run}
    if not with_phases:
        kept = {key: value for key, value in kept.items() if not isinstance(value, dict)}
    if "failed" in kept:
        kept["failed"] = kept["failed"][-300:]
    if "images" in kept:
        kept["images"] = [{k: image.get(k) for k in IMAGE_KEYS} for image in kept["images"]]
    if "dump_copy_gbs" in kept:
        kept["pinned_gbs"] = [rates.get("d2h_gbs_median"), rates.get("h2d_gbs_median")]
    return kept


def _trials(document: Document, before: Document) -> Document:
    """The newest outcome of each program and case, and when that was."""
    when = f"{document['date']} at {(document['commit'] or 'unknown')[:12]}"
    programs = dict(before.get("programs", {}))
    for name, cases in document["programs"].items():
        kept = {
            case: {key: one[key] for key in ("outcome", "expected")} for case, one in cases.items()
        }
        programs[name] = programs.get(name, {}) | kept | {"taken": when}
    return {"programs": programs}


def _by_job(document: Document, before: Document) -> Document:
    """The newest measurement of each job, by engine and most ranks where there are such."""
    _, *parts = str(document.get("lane") or document["gpu"]).split(", ")
    if ranks := [row["ranks"] for row in document.get("rows", []) if "ranks" in row]:
        parts.append(f"up to {max(ranks)} ranks")
    own = {key: value for key, value in document.items() if key not in ("machine", "sha256")}
    return {"jobs": before.get("jobs", {}) | {", ".join([document["job"], *parts]): own}}


def _whole(document: Document, before: Document) -> Document:
    return document


SUMS: dict[str, Callable[[Document, Document], Document]] = {
    "bench": _bench,
    "campaign": _campaign,
    "engine-steps": _engine_steps,
    "faults": _faults,
    "kernels": _kernels,
    "nodes": _by_job,
    "preempt": _by_job,
    "replicas": _by_job,
    "shares": _shares,
    "soak": _soak,
    "stall": _by_job,
    "storm": _storm,
    "support": _support,
    "trials": _trials,
}


def summed(document: Document, before: Document) -> Document:
    """The summary of a document of rows, where the one `before` is what there was of its kind."""
    name = name_of(document)
    make = next(
        (of for kind, of in SUMS.items() if name.split("-")[0] == kind.split("-")[0]), _whole
    )
    found = heading(document) | make(document, before)
    return found | {"sha256": document["sha256"]}


def load(path: Path) -> Document:
    """A summary, or nothing where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def kept(kind: str, folder: Path = RESULTS) -> dict[str, Document]:
    """The summaries of a kind by machine, real GPUs first, those of the newest models before."""
    found = {path.parent.name: load(path) for path in folder.glob(f"*/{kind}.json")}
    return dict(sorted(found.items(), key=lambda item: item[0], reverse=True))


def write(raw: Path, folder: Path = RESULTS) -> Path:
    """Rewrite the summary that `raw` belongs to; its path. The same file again changes nothing."""
    text = raw.read_bytes()
    document = json.loads(text) | {"sha256": hashlib.sha256(text).hexdigest()}
    path = folder / slug(gpu_of(document)) / f"{name_of(document)}.json"
    before = load(path)
    if before.get("sha256") != document["sha256"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(summed(document, before)))
    return path


def _text(document: Document) -> str:
    """The document as JSON, with a list or an object of plain values on one line."""

    def on_a_line(found: re.Match[str]) -> str:
        return found[1] + re.sub(r"\n\s+", " ", found[2]) + found[3]

    text = json.dumps(_rounded(document), indent=1)
    return re.sub(r"([\[{])\n\s+([^][{}]*?)\n\s+([\]}])", on_a_line, text) + "\n"


def _rounded(value: Any) -> Any:
    """With nine digits, which is more than any measurement has."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def too_large(folder: Path = RESULTS) -> list[str]:
    """What is wrong with the kept results: files of rows, large files, too much in all."""
    sizes = {p.relative_to(folder): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    wrong = [f"{path} has {size} bytes" for path, size in sizes.items() if size > LARGEST]
    wrong += [f"{path} is no <machine>/<kind>.json" for path in sizes if len(path.parts) != 2]
    wrong += [
        f"{path} has a date in its name" for path in sizes if re.search(r"20\d\d-", str(path))
    ]
    if (whole := sum(sizes.values())) > LARGEST_OF_ALL:
        wrong.append(f"all of it has {whole} bytes")
    return sorted(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.summary")
    parser.add_argument("files", nargs="+", type=Path)
    for raw in parser.parse_args().files:
        print(write(raw).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
