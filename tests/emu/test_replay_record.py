"""What an image tells of the objects that the replay engine makes again (`inspect --record`)."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flowgpu.errors import RecordMissing
from tests.emu.test_checkpoint import Run, command, flowgpu, runs, runtime_dir

REPLAY = ("--engine", "replay")

# Has an object of each kind. It makes one more stream once a file is there.
OBJECTS = """
import os, sys, time
import numpy as np
from tests.emu.array_lib import *
from tests.emu.driver_lib import *
start()
ok(cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE, 4096))
urgent = ok(cu.cuStreamCreateWithPriority(1, -1))
event = ok(cu.cuEventCreate(2))
ok(cu.cuEventRecord(event, urgent))
kernel = function(b"inc")
pool = ok(cu.cuMemPoolCreate(pool_properties()))
threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(5 << 20)))
array = ok(cu.cuArrayCreate(plane(33, 7)))
reserved = ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0))
pages = ok(cu.cuMemHostAlloc(8192, 1))
data = int(ok(cu.cuMemAlloc(1024)))
graph = ok(cu.cuGraphCreate(0))
fill = cu.CUDA_MEMSET_NODE_PARAMS()
fill.dst, fill.elementSize, fill.width, fill.height, fill.value = data, 4, 256, 1, 7
node = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill, ok(cu.cuCtxGetCurrent())))
executable = ok(cu.cuGraphInstantiate(graph, 0))
print("made", hex(int(urgent)), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
more = ok(cu.cuStreamCreate(0))
print("one more", hex(int(more)), flush=True)
while True:
    ok(cu.cuStreamSynchronize(more))
    time.sleep(0.05)
"""


def rows(image: Path) -> list[dict[str, Any]]:
    told = flowgpu("inspect", image, "--record", "--json")
    assert told.returncode == 0, told.stderr
    (process,) = json.loads(told.stdout)["record"]
    found: list[dict[str, Any]] = process["objects"]
    return found


def one(objects: list[dict[str, Any]], call: str) -> dict[str, Any]:
    (found,) = [row for row in objects if row.get("call") == call]
    return found


def test_an_image_lists_the_objects_of_its_job_and_two_differ_by_what_was_made(
    runs: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run: Run = runs("objects", [sys.executable, "-c", OBJECTS, str(go)], "", *REPLAY)
    run.wait_lines(1)
    run.dump(tmp_path / "first", "--leave-running")
    run.dump(tmp_path / "again", "--leave-running")
    go.touch()
    run.wait_lines(2)
    run.dump(tmp_path / "last")  # which ends CUDA in the job instead

    first = rows(tmp_path / "first")
    assert rows(tmp_path / "again") == first
    made = [row for row in rows(tmp_path / "last") if row not in first]
    assert [(row["kind"], row["call"], row["values"]) for row in made] == [
        ("stream", "cuStreamCreate", [0])
    ]
    assert made[0]["handle"] == run.lines[1].split()[-1]

    urgent = one(first, "cuStreamCreateWithPriority")
    assert urgent["handle"] == run.lines[0].split()[-1]
    assert (urgent["kind"], urgent["values"]) == ("stream", [1, -1])
    context = one(first, "cuDevicePrimaryCtxRetain")
    assert urgent["context"] == context["handle"]
    assert {"call": "cuCtxSetLimit", "values": [0, 4096]} in context["set"]
    event = one(first, "cuEventCreate")
    assert (event["values"], event["recorded"]) == ([2], True)
    kernel = one(first, "cuModuleGetFunction")
    assert kernel["values"] == [kernel["parent"], "inc"]
    module = next(row for row in first if row["kind"] == "module")
    assert module["handle"] == kernel["parent"]
    pool = one(first, "cuMemPoolCreate")
    (change,) = pool["set"]
    assert change == {"call": "cuMemPoolSetAttribute", "values": [pool["handle"], 4, 5 << 20]}
    assert one(first, "cuArrayCreate_v2")["values"] == [[33, 7, 32, 1]]
    assert one(first, "cuMemHostAlloc")["values"] == [8192, 1]
    assert [4 << 20] in [row["values"] for row in first if row["kind"] == "reservation"]
    assert one(first, "cuGraphCreate")["nodes"] == ["memset"]
    assert one(first, "cuGraphInstantiateWithFlags")["nodes"] == ["memset"]
    # Older ones first, as each needs them; graphs are made when the memory is back.
    serials = [row["serial"] for row in first if "serial" in row and "nodes" not in row]
    assert serials == sorted(serials)

    text = flowgpu("inspect", tmp_path / "last", "--record").stdout
    assert (
        f"stream           {urgent['handle']}  cuStreamCreateWithPriority(1, -1), context " in text
    )
    assert "cuCtxSetLimit(0, 4096)" in text


def test_an_image_without_a_record_says_so(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("no-record", command("modules"))
    run.wait_lines(3)
    run.dump(tmp_path / "image")
    told = flowgpu("inspect", tmp_path / "image", "--record")
    assert told.returncode == RecordMissing.exit_code, told.stderr
    assert "engine native" in told.stderr
