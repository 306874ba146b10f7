"""Dump and restore workloads at random moments and compare every line with an undisturbed run.

    python -m tests.gpu.campaign --workloads all --dumps 10 --parallel 4 --gpu nvidia --out DIR
    python -m tests.gpu.campaign --workloads all,gpt2_xl --gpus 4 --parallel 6 --out DIR
    python -m tests.gpu.campaign ... --out DIR --deadline 530 --resume

Each workload first runs without FlowGPU; then under it, dumped to a tmpfs and restored again and
again, until it is done. It sees one GPU, by CUDA_VISIBLE_DEVICES, or as many as it works on;
`--parallel` of them share one, but a heavy one has its GPUs to itself, and all must fit into the
machine's memory. `all` are those that work on one GPU.

DIR gets campaign.json, rewritten after each dump, and the logs of what went wrong. With --deadline
everything is ended then; with --resume a later call does the workloads that were cut off or not
begun, and only those: one that failed stays failed. The exit code is 0 if all workloads ended with
the very same lines, 3 if time was up and none failed, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowgpu.errors import FlowError
from flowgpu.launch import GpuKind
from flowgpu.vocabulary import MODE_CHOICES
from tests.gpu.catalogue import Workload, choose
from tests.gpu.harness import Baseline, Outcome, Plan, Soak, baseline_of
from tests.gpu.site import Site, Trouble, many_pids
from tests.gpu.slots import Slots, host_memory, visible_gpus

BASELINE_SECONDS = 120.0
# Kept back so that jobs can be ended before the deadline.
CLEANUP_SECONDS = 10.0
TIME_UP_EXIT = 3
HEADS = (
    *("workload", "dumps", "restores", "identical", "pause s: median", "max"),
    *("restore s: median", "max", "image MiB", "seconds", ""),
)


class Campaign:
    """All workloads of one call."""

    def __init__(
        self,
        site: Site,
        workloads: Sequence[Workload],
        plan: Plan,
        out: Path,
        *,
        limit: float,
        deadline: float | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`limit`: seconds after which no further workload is begun; `deadline`: when all end."""
        self._site, self._plan, self._out, self._gpus = site, plan, out, list(gpus)
        self.began = time.monotonic()
        self._limit = limit
        self._deadline = math.inf if deadline is None else deadline - CLEANUP_SECONDS
        # The longest first, so that none of them is left over at the end; those of several GPUs and
        # the heavy ones, which want empty GPUs, before any other.
        self._workloads = sorted(workloads, key=lambda w: (-w.gpus, -int(w.needs["gpu_memory"])))
        self._lock = threading.Lock()
        self.outcomes: dict[str, Outcome] = {}

    def resume(self) -> None:
        """Take over what an earlier call brought to its end."""
        with suppress(FileNotFoundError):
            document = json.loads((self._out / "campaign.json").read_text())
            for found in document["workloads"]:
                outcome = Outcome.from_json(found)
                if outcome.complete:
                    self.outcomes[outcome.workload] = outcome
        self._workloads = [w for w in self._workloads if w.name not in self.outcomes]

    def run(self, slots: Slots) -> list[Outcome]:
        """Begin one after another as soon as there is a place, in the order of the list."""
        with ThreadPoolExecutor(slots.places) as pool:
            futures = []
            for workload in self._workloads:
                lacking = workload.missing()
                if lacking:
                    not_run = f"{lacking} is not here"
                    self._end(Outcome(workload.name, not_run=not_run, complete=True))
                    continue
                gpu = slots.take(workload, self._left())
                if gpu is None:
                    self._end(Outcome(workload.name, not_run="no time was left"))
                    continue
                futures.append(pool.submit(self._one, workload, slots, gpu))
            for future in futures:
                future.result()
        return [self.outcomes[name] for name in sorted(self.outcomes)]

    def _one(self, workload: Workload, slots: Slots, gpu: str) -> None:
        """Both runs of a workload, in the place that it has."""
        try:
            site = self._site.on(gpu)
            baseline = self._baseline(workload, site)
            if baseline is not None:
                self._soak(workload, site, baseline, gpu)
        finally:
            slots.give_back(workload, gpu)

    def _left(self) -> float:
        """Seconds in which a workload may be begun."""
        return self.began + min(self._limit, self._deadline) - time.monotonic()

    def _until_deadline(self) -> float:
        return self.began + self._deadline - time.monotonic()

    def _time_up(self) -> bool:
        return self._until_deadline() <= 0

    def _baseline(self, workload: Workload, site: Site) -> Baseline | None:
        """The undisturbed run; None if there is none, which the outcome tells."""
        try:
            seconds = max(min(BASELINE_SECONDS, self._until_deadline()), 1.0)
            baseline = baseline_of(site, workload, self._plan, seconds)
        except Trouble as trouble:
            if self._time_up():
                self._end(Outcome(workload.name, not_run="no time was left"))
            else:
                self._end(Outcome(workload.name, problems=[str(trouble)], complete=True))
            return None
        say(
            f"{workload.name}: {baseline.steps} steps without FlowGPU in {baseline.seconds:.1f} s, "
            f"{baseline.seconds_per_step * 1000:.1f} ms a step"
        )
        return baseline

    def _soak(self, workload: Workload, site: Site, baseline: Baseline, gpu: str) -> None:
        left = self._until_deadline()
        if left <= 0:
            self._end(Outcome(workload.name, not_run="no time was left"))
            return
        plan = replace(self._plan, deadline=min(self._plan.deadline, left))
        soak = Soak(site, workload, baseline, plan, self._out, self._keep)
        soak.outcome.gpu = gpu
        try:
            outcome = soak.run()
        except Exception as error:
            outcome = soak.outcome
            outcome.problems.append(f"{type(error).__name__}: {error}")
        # What is not the same stays so, however little time there was.
        if self._time_up() and not outcome.ok and outcome.identical is not False:
            outcome.not_run = "the time was up"
        else:
            outcome.complete = True
        self._end(outcome)

    def _keep(self, outcome: Outcome) -> None:
        """Note an outcome, which may not be complete yet."""
        with self._lock:
            self.outcomes[outcome.workload] = outcome
            self.save()

    def _end(self, outcome: Outcome) -> None:
        self._keep(outcome)
        say(" ".join(row(outcome)))

    def save(self) -> None:
        document = {
            "gpu": self._site.kind,
            "gpus": self._gpus,
            "plan": asdict(self._plan),
            "command": sys.argv[1:],
            "seconds": time.monotonic() - self.began,
            "workloads": [self.outcomes[name].as_json() for name in sorted(self.outcomes)],
        }
        self._out.mkdir(parents=True, exist_ok=True)
        temporary = self._out / "campaign.tmp"
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        temporary.replace(self._out / "campaign.json")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def row(outcome: Outcome) -> list[str]:
    """The cells of HEADS."""

    def of(
        reports: list[dict[str, Any]],
        key: str,
        how: Callable[[list[float]], float],
        unit: float = 1,
    ) -> str:
        # A suspension writes no image.
        values = [report[key] / unit for report in reports if key in report]
        return f"{how(values):.2f}" if values else "-"

    state = {True: "yes", False: "NO", None: "-"}[outcome.identical]
    end = outcome.not_run or ("ok" if outcome.ok else f"{len(outcome.problems)} problems")
    return [
        outcome.workload,
        str(len(outcome.dumps)),
        str(len(outcome.restores)),
        state,
        of(outcome.dumps, "pause_seconds", statistics.median),
        of(outcome.dumps, "pause_seconds", max),
        of(outcome.restores, "restore_seconds", statistics.median),
        of(outcome.restores, "restore_seconds", max),
        of(outcome.dumps, "image_bytes", statistics.median, 1 << 20),
        f"{outcome.seconds:.0f}",
        end,
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a workload, columns aligned."""
    rows = [list(HEADS), *(row(outcome) for outcome in outcomes)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Plan()
    parser.add_argument("--workloads", default="all", help="names joined by commas, or all")
    parser.add_argument("--dumps", type=int, default=default.dumps, help="dumps a workload")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the random moments")
    parser.add_argument("--parallel", type=int, default=4, help="workloads at once on a GPU")
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all that are visible)")
    parser.add_argument("--out", type=Path, default=Path("build/campaign"), help="results, logs")
    parser.add_argument("--images", type=Path, help="where images go (default: a tmpfs)")
    parser.add_argument(
        "--leave-running", action="store_true", help="dump and go on, restore the last image"
    )
    parser.add_argument("--mode", choices=MODE_CHOICES, default=default.mode, help="of all dumps")
    parser.add_argument("--suspend", action="store_true", help="suspend and resume, do not dump")
    parser.add_argument("--communicators", choices=("keep", "rebuild"), default="keep")
    parser.add_argument("--engine", choices=("native", "replay"), default="", help="of all dumps")
    parser.add_argument("--prepared", choices=("native", "replay"), default="", help="if another")
    parser.add_argument("--longest-wait", type=float, default=default.longest_wait)
    parser.add_argument("--work-seconds", type=float, default=default.work_seconds)
    parser.add_argument("--job-seconds", type=float, default=default.job_seconds)
    parser.add_argument(
        "--workload-seconds", type=float, default=default.deadline, help="a workload's deadline"
    )
    parser.add_argument("--deadline", type=float, help="seconds that this call may take")
    parser.add_argument(
        "--resume", action="store_true", help="do what an earlier call did not bring to its end"
    )
    parser.add_argument(
        "--limit", type=float, default=420.0, help="begin no workload after so many seconds"
    )
    return parser.parse_args(arguments)


def gpus_of(kind: GpuKind, wanted: int | None) -> list[str]:
    """The GPUs to use; as many as wanted are emulated. Raises ValueError."""
    if kind == "emulated" and wanted is not None:
        os.environ["FLOWGPU_EMU_DEVICES"] = str(wanted)  # read by the device when it starts
    gpus = visible_gpus(kind, wanted)
    if not gpus:
        raise ValueError("no GPU is visible")
    return gpus


def main() -> int:
    arguments = parse()
    plan = Plan(
        dumps=arguments.dumps,
        seed=arguments.seed,
        leave_running=arguments.leave_running,
        mode=arguments.mode,
        suspend=arguments.suspend,
        communicators=arguments.communicators,
        engine=arguments.engine,
        prepared=arguments.prepared,
        longest_wait=arguments.longest_wait,
        work_seconds=arguments.work_seconds,
        job_seconds=arguments.job_seconds,
        deadline=arguments.workload_seconds,
    )
    try:
        workloads = choose(arguments.workloads, arguments.gpu)
        gpus = gpus_of(arguments.gpu, arguments.gpus)
        with many_pids(), Site(arguments.gpu, arguments.images) as site:
            site.end_when_terminated()
            campaign = Campaign(
                *(site, workloads, plan, arguments.out),
                limit=arguments.limit,
                deadline=arguments.deadline,
                gpus=gpus,
            )
            room = host_memory(site.images)
            slots = Slots(arguments.gpu, gpus, arguments.parallel, room)
            if arguments.resume:
                campaign.resume()
            if arguments.deadline is not None:
                # Should something not have ended by then; every dump is in the file.
                signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
                signal.setitimer(signal.ITIMER_REAL, arguments.deadline)
            outcomes = campaign.run(slots)
    except (FlowError, ValueError) as error:
        say(f"Error: {error}")
        return 2
    print(table(outcomes))
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.workload}: {problem}")
    done = sum(outcome.ok for outcome in outcomes)
    dumps = sum(len(outcome.dumps) for outcome in outcomes)
    seconds = time.monotonic() - campaign.began
    print(f"{done} of {len(outcomes)} workloads ok, {dumps} dumps, {seconds:.0f} s")
    if done == len(outcomes):
        return 0
    cut_off = [outcome for outcome in outcomes if not outcome.complete]
    return TIME_UP_EXIT if done + len(cut_off) == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
