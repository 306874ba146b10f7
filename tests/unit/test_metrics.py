"""`flowgpu metrics`: what Prometheus' own parser reads is what was counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from store_lib import write
from test_cli import flowgpu

from flowgpu import metrics
from flowgpu.image import layout
from flowgpu.image.store import Store
from flowgpu.jobs import EXITED, RUNNING, Job, Registry, start_time
from flowgpu.metrics import BUCKETS, KINDS, Counts, Family, Sample, counting

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib" / "grafana"
REPORT = {
    "engine": "replay",
    "pause_seconds": 0.3,
    **{f"gpu_bytes_{kind}": 8 for kind in KINDS},
    "cpu_bytes": 4,
    "image_bytes": 12,
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def samples(families: list[Metric]) -> Samples:
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def registry(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(runtime_dir))
    return Registry()


def make(registry: Registry, name: str, *, runs: bool, **fields: Any) -> Job:
    job = registry.create(command=["true"], cwd="/", gpu="emulated", name=name, **fields)
    changes: dict[str, Any] = {"state": RUNNING if runs else EXITED}
    pid = os.getpid() if runs else 0
    changes |= {"coordinator_pid": pid, "coordinator_start": start_time(pid)}
    return registry.dir(job.id).update(**changes)


def test_what_is_counted_is_what_prometheus_reads(registry: Registry) -> None:
    job = make(registry, "train", runs=True)
    for pause in (0.04, 0.3, 99.0):
        with counting(registry.dir(job.id).counts) as counts:
            counts.dumped(REPORT | {"pause_seconds": pause})
    with counting(registry.dir(job.id).counts) as counts:
        counts.checkpoints["failed"] += 1
        counts.restored({"restore_seconds": 1.5})
    families = parsed(metrics.text(metrics.of_jobs(registry)))
    assert all(family.documentation for family in families)
    found = samples(families)
    which = {"job_name": "train"}
    operations = "flowgpu_checkpoint_operations_total"
    assert value(found, operations, **which, result="done") == 3
    assert value(found, operations, **which, result="failed") == 1
    pauses, of = "flowgpu_checkpoint_pause_seconds", which | {"engine": "replay"}
    assert value(found, f"{pauses}_bucket", **of, le="0.05") == 1
    assert value(found, f"{pauses}_bucket", **of, le="0.5") == 2
    assert value(found, f"{pauses}_bucket", **of, le="60") == 2
    assert value(found, f"{pauses}_bucket", **of, le="+Inf") == 3
    assert value(found, f"{pauses}_count", **of) == 3
    assert value(found, f"{pauses}_sum", **of) == pytest.approx(99.34)
    assert value(found, "flowgpu_image_size_bytes", **which, kind="image") == 12
    assert value(found, "flowgpu_restore_seconds", **which) == 1.5
    last = value(found, "flowgpu_checkpoint_last_success_timestamp_seconds", **which)
    assert last == pytest.approx(metrics.time.time(), abs=60)
    assert value(found, "flowgpu_jobs", state="running") == 1


def test_jobs_of_one_name_are_counted_as_one(registry: Registry) -> None:
    for runs in (False, False, True):
        job = make(registry, "train", runs=runs)
        with counting(registry.dir(job.id).counts) as counts:
            counts.dumped(REPORT)
    found = samples(parsed(metrics.text(metrics.of_jobs(registry))))
    operations = "flowgpu_checkpoint_operations_total"
    assert value(found, operations, job_name="train", result="done") == 3
    assert value(found, "flowgpu_jobs", state="exited") == 2


def test_nobody_is_alerted_of_a_job_that_has_ended(registry: Registry) -> None:
    job = make(registry, "train", runs=False)
    with counting(registry.dir(job.id).counts) as counts:
        counts.dumped(REPORT)
    names = {name for name, _ in samples(parsed(metrics.text(metrics.of_jobs(registry))))}
    assert "flowgpu_checkpoint_operations_total" in names
    assert "flowgpu_checkpoint_last_success_timestamp_seconds" not in names


def test_a_restored_job_goes_on_counting(registry: Registry) -> None:
    job = make(registry, "train", runs=False)
    with counting(registry.dir(job.id).counts) as counts:
        counts.dumped(REPORT)
    (registry.dir(job.id).path / "output.log").touch()
    again = make(registry, "train", runs=True, job_id=job.id, image="/image")
    assert Counts.read(registry.dir(again.id).counts).checkpoints["done"] == 1
    assert not (registry.dir(job.id).path / "output.log").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoints": 1}', "null"])
def test_counts_that_cannot_be_read_begin_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "counts.json").write_text(text)
    assert Counts.read(tmp_path / "counts.json") == Counts()
    counted = Counts()
    counted.dumped(REPORT)
    counted.write(tmp_path / "no" / "counts.json")  # a job goes on without it
    counted.write(tmp_path / "counts.json")
    assert Counts.read(tmp_path / "counts.json") == counted


def test_labels_are_anyones_text() -> None:
    for name in ('a"b\\c\nd', "\udcff", "é"):
        family = Family("x", "gauge", "A number.", [Sample(1.0, {"store": name})])
        text = metrics.text([family])
        text.encode()
        (sample,) = parsed(text)[0].samples
        assert sample.labels["store"] == name.encode(errors="backslashreplace").decode()


def test_stores_are_told_and_one_that_is_gone_too(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    base = None
    for _ in range(3):
        image = store.next_image()
        write(image, [[1, 2, 0]], base, "a" * 12)
        base = image
    (store.path / store.names()[0] / layout.MANIFEST).write_bytes(b"{")
    output = tmp_path / "flowgpu.prom"
    code = flowgpu("metrics", "--store", store.path, "--store", tmp_path / "gone", "-o", output)
    assert code == 0
    assert capsys.readouterr().out == ""
    assert output.stat().st_mode & 0o777 == 0o666 & ~metrics_umask()
    found = samples(parsed(output.read_text()))
    assert value(found, "flowgpu_store_readable", store="store") == 1
    assert value(found, "flowgpu_store_readable", store="gone") == 0
    assert value(found, "flowgpu_store_images", store="store", state="whole") == 2
    assert value(found, "flowgpu_store_images", store="store", state="damaged") == 1
    used = value(found, "flowgpu_store_used_bytes", store="store")
    measured = subprocess.check_output(["du", "-s", "-B1", str(store.path)], text=True)
    folders = sum(1 for path in store.path.rglob("*") if path.is_dir()) + 1
    assert 0 <= int(measured.split()[0]) - used <= folders * 8192
    assert value(found, "flowgpu_store_capacity_bytes", store="store") >= used
    assert list(tmp_path.glob(".flowgpu.prom*")) == []


def metrics_umask() -> int:
    from flowgpu.jobs import user_umask

    return user_umask()


def test_two_stores_of_one_name_are_refused(registry: Registry, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "images").mkdir(parents=True)
    stores = [tmp_path / folder / "images" for folder in ("a", "b")]
    assert flowgpu("metrics", "--store", stores[0], "--store", stores[1]) == 2


def test_the_dashboard_and_the_rules_ask_for_what_there_is(
    registry: Registry, tmp_path: Path
) -> None:
    job = make(registry, "train", runs=True)
    with counting(registry.dir(job.id).counts) as counts:
        counts.dumped(REPORT)
        counts.restored({"restore_seconds": 1.0})
    write(Store(tmp_path).next_image(), [[1]], None, "a" * 12)
    families = [*metrics.of_jobs(registry), *metrics.of_stores({"s": Store(tmp_path)})]
    known = {name for name, _ in samples(parsed(metrics.text(families)))}
    board = json.loads((CONTRIB / "flowgpu.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) >= len(board["panels"])
    text = "\n".join([*asked, (CONTRIB / "flowgpu.rules.yml").read_text()])
    wanted = set(re.findall(r"\bflowgpu_\w+", text))
    assert wanted <= known
    assert len(wanted) > 8


def test_the_product_needs_no_client_of_prometheus() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import flowgpu.metrics"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")
def test_promtool_finds_nothing_to_say(registry: Registry) -> None:
    job = make(registry, "train", runs=True)
    with counting(registry.dir(job.id).counts) as counts:
        counts.dumped(REPORT)
    text = metrics.text(metrics.of_jobs(registry))
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    rules = ["promtool", "check", "rules", str(CONTRIB / "flowgpu.rules.yml")]
    subprocess.run(rules, check=True, capture_output=True)


def test_every_pause_is_in_one_bucket() -> None:
    pauses = metrics.Pauses()
    for seconds in (0.0, *BUCKETS, 1e9):
        pauses.add(seconds)
    assert pauses.counts == [2, *[1] * (len(BUCKETS) - 1), 1]
