"""Places of a campaign: how many on a GPU, what runs alone, and what fits into memory."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu import campaign, slots
from tests.gpu import site as site_module
from tests.gpu.catalogue import HEAVY, Workload
from tests.gpu.harness import Baseline, Plan
from tests.gpu.job import Job
from tests.gpu.slots import MIB, Slots, visible_gpus

PLENTY = 1 << 50
GIB = 1 << 30


def workload(name: str, gpu_memory: int = 1000, processes: int = 1) -> Workload:
    return Workload(name, {"gpu": "any", "gpu_memory": gpu_memory, "processes": processes}, {})


LIGHT, HEAVY_ONE = workload("light"), workload("heavy", HEAVY)


def test_gpus_are_filled_evenly_up_to_their_places() -> None:
    made = Slots("nvidia", ["0", "1", "2"], 2, PLENTY)
    assert made.places == 6
    taken = [made.take(LIGHT, 0.0) for _ in range(6)]
    assert taken == ["0", "1", "2", "0", "1", "2"]
    assert made.take(LIGHT, 0.0) is None
    made.give_back(LIGHT, "1")
    assert made.take(LIGHT, 0.0) == "1"


def test_among_equally_full_gpus_the_one_with_more_memory_left_is_taken() -> None:
    made = Slots("nvidia", ["0", "1"], 3, PLENTY)
    assert made.take(workload("large", 9000), 0.0) == "0"
    assert [made.take(LIGHT, 0.0) for _ in range(2)] == ["1", "1"]


def test_a_heavy_one_is_alone_on_its_gpu() -> None:
    made = Slots("nvidia", ["0", "1"], 4, PLENTY)
    assert made.take(HEAVY_ONE, 0.0) == "0"
    assert [made.take(LIGHT, 0.0) for _ in range(5)] == ["1", "1", "1", "1", None]
    assert made.take(HEAVY_ONE, 0.0) is None
    made.give_back(HEAVY_ONE, "0")
    assert made.take(LIGHT, 0.0) == "0"
    assert made.take(HEAVY_ONE, 0.0) is None


def test_one_of_several_gpus_has_a_place_on_each() -> None:
    pair = Workload("pair", LIGHT.needs | {"gpus": 2}, {})
    made = Slots("nvidia", ["0", "1", "2"], 2, PLENTY)
    assert made.take(LIGHT, 0.0) == "0"
    assert [made.take(pair, 0.0) for _ in range(3)] == ["1,2", "0,1", None]
    assert made.take(LIGHT, 0.0) == "2"
    made.give_back(pair, "0,1")
    assert [made.take(LIGHT, 0.0) for _ in range(3)] == ["0", "1", None]
    assert made.take(pair, 0.0) is None
    # Alone on all of its GPUs, if it is heavy; and it wants memory for the images of each.
    heavy = Workload("pair", HEAVY_ONE.needs | {"gpus": 2}, {})
    assert Slots("nvidia", ["0"], 2, PLENTY).take(heavy, 0.0) is None
    made = Slots("nvidia", ["0", "1"], 2, PLENTY)
    assert made.cost(heavy) > 2 * HEAVY * 2 * MIB
    assert [made.take(heavy, 0.0), made.take(LIGHT, 0.0)] == ["0,1", None]


def test_images_and_processes_of_all_fit_into_memory() -> None:
    made = Slots("nvidia", ["0", "1"], 8, 24 * GIB)
    each = workload("each", 2048, processes=1)
    assert made.cost(each) == 8 * GIB
    assert [made.take(each, 0.0) for _ in range(4)] == ["0", "1", "0", None]
    made.give_back(each, "1")
    assert made.take(each, 0.0) == "1"


def test_what_never_fits_runs_when_nothing_else_does() -> None:
    made = Slots("nvidia", ["0", "1"], 2, 10 * GIB)
    assert made.take(LIGHT, 0.0) == "0"
    assert made.take(HEAVY_ONE, 0.0) is None
    made.give_back(LIGHT, "0")
    assert made.take(HEAVY_ONE, 0.0) == "0"
    assert made.take(LIGHT, 0.0) is None


def test_a_place_that_becomes_free_is_taken_at_once() -> None:
    made = Slots("nvidia", ["7"], 1, PLENTY)
    assert made.take(LIGHT, 0.0) == "7"
    timer = threading.Timer(0.1, made.give_back, (LIGHT, "7"))
    began = time.monotonic()
    timer.start()
    assert made.take(LIGHT, 10.0) == "7"
    assert 0.05 < time.monotonic() - began < 5.0
    timer.join()


def test_without_a_limit_it_waits_as_long_as_it_takes() -> None:
    made = Slots("nvidia", ["0"], 1, PLENTY)
    assert made.take(LIGHT, float("inf")) == "0"
    threading.Timer(0.05, made.give_back, (LIGHT, "0")).start()
    assert made.take(LIGHT, float("inf")) == "0"


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.sampled_from([500, 2000, 9000, HEAVY]), max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(5, 60),
)
def test_no_gpu_and_no_memory_is_ever_overfull(
    sizes: list[int], gpus: int, parallel: int, gib: int
) -> None:
    made = Slots("nvidia", [str(i) for i in range(gpus)], parallel, gib * GIB)
    work = [workload(str(i), size) for i, size in enumerate(sizes)]
    running: list[tuple[str, Workload]] = []
    lock = threading.Lock()

    def run(one: Workload, gpu: str) -> None:
        with lock:
            running.append((gpu, one))
            here = [other for where, other in running if where == gpu]
            assert len(here) <= parallel
            assert len(here) == 1 or not any(other.heavy for other in here)
            total = sum(made.cost(other) for _, other in running)
            assert total <= gib * GIB or len(running) == 1
        time.sleep(0.001)
        with lock:
            running.remove((gpu, one))
        made.give_back(one, gpu)

    with ThreadPoolExecutor(made.places) as pool:
        futures = []
        for one in work:
            gpu = made.take(one, 10.0)
            assert gpu is not None
            futures.append(pool.submit(run, one, gpu))
        for future in futures:
            future.result()


@pytest.mark.parametrize(
    ("variable", "wanted", "expected"),
    [
        (None, None, ["0", "1", "2"]),
        (None, 2, ["0", "1"]),
        ("5,GPU-17, 3", None, ["5", "GPU-17", "3"]),
        ("5,GPU-17", 1, ["5"]),
        ("", None, []),
    ],
)
def test_gpus_are_those_that_this_process_sees(
    variable: str | None,
    wanted: int | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWGPU_EMU_DEVICES", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus("emulated", wanted) == expected
    with pytest.raises(ValueError, match="9 GPUs"):
        visible_gpus("emulated", 9)


def test_real_gpus_are_counted_by_their_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["nvidia7", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia12", "null"]
    monkeypatch.setattr(slots.os, "listdir", lambda _: names)
    monkeypatch.setattr(slots.os, "access", lambda path, _: path != "/dev/nvidia12")
    # A container may have any of the machine's files: CUDA counts what it sees from 0.
    assert visible_gpus("nvidia", None) == ["0", "1"]


class FakeSite:
    """Where nothing runs: notes which GPU each part of a campaign was given."""

    kind = "emulated"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on(self, gpu: str) -> FakeSite:
        self.seen.append(gpu)
        return self


@pytest.mark.parametrize("seconds", [None, 0.3])
def test_a_campaign_spreads_its_workloads_and_says_where_each_ran(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Soak:
        def __init__(self, site: FakeSite, workload: Workload, *_: object) -> None:
            self.outcome = campaign.Outcome(workload.name)

        def run(self) -> campaign.Outcome:
            time.sleep(0.2)
            self.outcome.identical = True
            return self.outcome

    monkeypatch.setattr(campaign, "baseline_of", lambda *_: Baseline(1, [], 0.1, 0.1))
    monkeypatch.setattr(campaign, "Soak", Soak)
    site = FakeSite()
    work = [workload(f"w{i}") for i in range(4)] + [workload("huge", HEAVY)]
    made = campaign.Campaign(
        site,  # type: ignore[arg-type]
        work,
        Plan(),
        tmp_path,
        limit=60.0,
        deadline=None if seconds is None else seconds + campaign.CLEANUP_SECONDS,
        gpus=["0", "1"],
    )
    outcomes = made.run(Slots("emulated", ["0", "1"], 1, PLENTY))
    ran = {outcome.workload: outcome.gpu for outcome in outcomes if outcome.ok}
    assert ran["huge"] == "0" and ran["w0"] == "1"  # the heavy one comes first
    if seconds is None:
        assert len(ran) == 5 and set(site.seen) == {"0", "1"}
    else:
        late = [outcome for outcome in outcomes if outcome.not_run]
        assert late and not any(outcome.complete for outcome in late)


def test_process_ids_are_many_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "pid_max"
    setting.write_text("32768\n")
    monkeypatch.setattr(site_module, "PID_MAX", setting)
    pids = [1, 300]
    monkeypatch.setattr(site_module.psutil, "pids", lambda: pids)
    with site_module.many_pids():
        assert setting.read_text() == "4194304"
    assert setting.read_text() == "32768\n"
    with site_module.many_pids():
        pids.append(32768)  # a job of another campaign
    assert setting.read_text() == "4194304"
    setting.write_text("4194304\n")
    with site_module.many_pids():
        assert setting.read_text() == "4194304\n"


def test_memory_is_that_of_machine_and_folder(tmp_path: Path) -> None:
    assert 16 * MIB < slots.host_memory(tmp_path) <= slots.memory("MemAvailable") + GIB


def test_a_job_is_not_taken_for_an_older_one_of_its_name(tmp_path: Path) -> None:
    found = []
    with site_module.Site("emulated") as site:
        for word in ("one", "two"):
            folder = tmp_path / word
            folder.mkdir()
            job = Job(site, "same", [sys.executable, "-c", f"print('step 0 {word}')"], folder)
            deadline = time.monotonic() + 60
            job.start(deadline)
            assert job.wait_end(deadline) == 0
            found.append((job.directory.path, job.lines()))
    (first, lines), (second, later) = found
    assert first != second
    assert lines + later == ["step 0 one", "step 0 two"]
