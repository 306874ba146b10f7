"""The engine replay, and which engine is chosen: real coordinator and CRIU, fake tasks and ghost.

The fake tasks count in their memory, and say `torn` when they are let go without CUDA.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from coordinator.process import alive
from flowgpu.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    EngineUnusable,
    FlowError,
    ImageDamaged,
    JobEnded,
    JobLost,
    RestoreFailed,
    Unsupported,
)
from flowgpu.image import inspect, layout
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.wire import Fault
from tests.unit.coordinator_job import SECONDS, Jobs, Running, wait_for
from tests.unit.test_coordinator_checkpoint import goes_on_as_before, is_counting
from tests.unit.test_coordinator_rollback import Two

OLD = {"FAKE_DRIVER_OLD": "1"}
CANNOT = "cuTexObjectCreate, cuArrayCreate"
UNPREPARED = "was started with --engine native"
EVERY = "it can save every task"


def engine_of(image: Path) -> tuple[str, str]:
    manifest = Image(image).manifest
    return manifest.engine, manifest.engine_reason


def restores(jobs: Jobs, image: Path, **options: dict[str, str]) -> Running:
    """The job goes on."""
    again = jobs.restore(image, **options)
    again.wait_steps(5)
    return again


def goes_on(again: Running, image: Path) -> bool:
    """From where its log in the image ends."""
    log = (image / "output.log").read_text().splitlines()
    return is_counting(log + again.lines)


def test_a_job_comes_back_without_the_drivers_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, engine="replay", ghost_env=OLD)
    result = job.dump(tmp_path / "image")
    assert job.end() == 75
    assert (result["engine"], result["engine_reason"]) == ("replay", EVERY)
    shown = inspect.summary(tmp_path / "image")
    assert (shown["engine"], shown["engine_reason"]) == ("replay", EVERY)
    Image(tmp_path / "image").verify()
    again = restores(jobs, tmp_path / "image", ghost_env=OLD)
    assert goes_on(again, tmp_path / "image"), again.log
    report = again.ask("wait-restored")
    steps = {"verify", "ghost", "criu", "copy", "engine", "mapback", "open"}
    assert set(report["phases"]) == steps
    # What was restored is prepared as it was.
    assert again.dump(tmp_path / "second")["engine"] == "replay"
    again = restores(jobs, tmp_path / "second", ghost_env=OLD)
    assert goes_on(again, tmp_path / "second"), again.log


def test_cuda_is_put_back_beside_the_making_of_blocks(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, engine="replay")
    job.dump(tmp_path / "image")
    again = restores(jobs, tmp_path / "image", ghost_env={"FAKE_CREATE_SECONDS": "0.5"})
    assert goes_on(again, tmp_path / "image")
    told = json.loads(again.directory.timeline.read_text())["timeline"]["spans"]
    spans = {name: (began, ended) for _, name, began, ended, *_ in told}
    assert spans["engine"][0] < spans["engine"][1] < spans["make memory"][1]


def dumped_two(jobs: Jobs, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """What two tasks have said before they were dumped to `image`; and the environment of a ghost
    that copies nothing until both have mapped their memory."""
    mapped = tmp_path / "mapped"
    mapped.mkdir()
    environment = {"FAKE_TASK_CAN": "3", "FAKE_TASK_MAPPED": str(mapped)}
    two = Two(jobs, environment, engine="replay", task_env=environment)
    two.job.dump(tmp_path / "image")
    assert two.job.end() == 75
    pids = [task.pid for task in Image(tmp_path / "image").manifest.tasks]
    assert len(pids) == 2
    return two.job.lines, {"FAKE_FILL_AFTER": ":".join(f"{mapped}/{pid}" for pid in pids)}


def test_tasks_map_their_memory_before_the_copy_into_it_ends(jobs: Jobs, tmp_path: Path) -> None:
    before, after_both = dumped_two(jobs, tmp_path)
    again = jobs.restore(tmp_path / "image", ghost_env=after_both)
    assert again.ask("wait-restored")["phases"].keys() >= {"mapback", "copy", "open"}
    for name in "ab":
        steps = [line[1:] for line in before if line.startswith(name)]
        wait_for(lambda: len(again.lines) > 20, "more steps")
        steps += [line[1:] for line in again.lines if line.startswith(name)]
        assert is_counting(steps), again.log


def test_damage_that_is_found_when_tasks_have_mapped_leaves_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    _, after_both = dumped_two(jobs, tmp_path)
    data = tmp_path / "image" / layout.gpu_data(0)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = jobs.restore(tmp_path / "image", ghost_env=after_both)
    with pytest.raises(ImageDamaged, match=rf"a chunk of {data.name} is damaged"):
        again.ask("wait-restored")
    again.process.wait(SECONDS)
    assert again.lines == []
    assert not any(map(alive, Image(tmp_path / "image").manifest.pids))
    # Nothing of it is in the way of another restore.
    data.write_bytes(whole)
    again = jobs.restore(tmp_path / "image", ghost_env=after_both)
    again.ask("wait-restored")
    again.wait_steps(5)


def test_a_task_that_maps_no_memory_early_gets_it_with_its_bytes(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs.task(3, engine="replay", task_env={"FAKE_TASK_CAN": "2"})
    job.dump(tmp_path / "image")
    again = restores(jobs, tmp_path / "image", ghost_env={"FAKE_COPY_SECONDS": "0.2"})
    assert goes_on(again, tmp_path / "image"), again.log


@pytest.mark.parametrize(
    ("prepared", "cannot", "asked", "engine", "reason"),
    [
        (False, "", "auto", "native", ""),
        (False, "", "native", "native", "asked for"),
        (True, "", "auto", "replay", EVERY),
        (True, "", "native", "native", "asked for"),
        (True, "", "replay", "replay", "asked for"),
        (True, CANNOT, "auto", "native", f"no replay: {CANNOT} (process PID)"),
        (True, CANNOT, "native", "native", "asked for"),
        (False, "", "replay", None, UNPREPARED),
        (True, CANNOT, "replay", None, rf"{CANNOT} \(process \d+\)"),
    ],
)
def test_which_engine_is_taken(
    jobs: Jobs,
    tmp_path: Path,
    prepared: bool,
    cannot: str,
    asked: str,
    engine: str | None,
    reason: str,
) -> None:
    job = jobs.task(
        2, engine="replay" if prepared else "native", task_env={"FAKE_TASK_UNREPLAYED": cannot}
    )
    image = tmp_path / "image"
    if engine is None:
        with pytest.raises(EngineUnusable, match=f"engine replay: .*{reason}"):
            job.dump(image, engine=asked)
        assert "checkpoint: gate" not in job.log
        goes_on_as_before(job, image)
        return
    job.dump(image, engine=asked)
    assert engine_of(image) == (engine, reason.replace("PID", str(job.record.root_pid)))
    assert any(jobs.states.iterdir()) == (engine == "native")
    again = restores(jobs, image)
    assert goes_on(again, image), again.log


def test_an_old_driver_leaves_no_other_engine(jobs: Jobs, tmp_path: Path) -> None:
    environment = {"FAKE_TASK_UNREPLAYED": CANNOT}
    job = jobs.task(2, engine="replay", task_env=environment, ghost_env=OLD)
    with pytest.raises(Unsupported, match=rf"driver .*\(no replay: {CANNOT} \(process \d+\)\)"):
        job.dump(tmp_path / "image")
    goes_on_as_before(job, tmp_path / "image")


@pytest.mark.parametrize("asked", ["auto", "replay"])
def test_what_comes_up_between_the_question_and_the_gate(
    jobs: Jobs, tmp_path: Path, asked: str
) -> None:
    two = Two(jobs, {"FAKE_TASK_UNREPLAYED_AT_GATE": CANNOT}, engine="replay")
    image = tmp_path / "image"
    if asked == "replay":
        with pytest.raises(EngineUnusable, match=CANNOT):
            two.job.dump(image, engine=asked)
        two.goes_on(image)
    else:
        two.job.dump(image, engine=asked, leave_running=True)
        two.wait_steps(5)
        engine, reason = engine_of(image)
        assert engine == "native" and CANNOT in reason


@pytest.mark.parametrize(
    "environment", [{"FLOWGPU_REPLAY": "0"}, {"FAKE_TASK_UNREPLAYED": CANNOT}], ids=["env", "names"]
)
def test_all_tasks_have_one_engine(jobs: Jobs, tmp_path: Path, environment: dict[str, str]) -> None:
    two = Two(jobs, environment, engine="replay")
    with pytest.raises(EngineUnusable, match=f"({UNPREPARED}|{CANNOT})"):
        two.job.dump(tmp_path / "image", engine="replay")
    two.goes_on(tmp_path / "image")
    two.job.dump(tmp_path / "image", leave_running=True)
    assert engine_of(tmp_path / "image")[0] == "native"
    two.wait_steps(5)


@pytest.mark.parametrize("fault", [Fault.TASK_REQUEST, Fault.TASK_REPLY])
def test_what_breaks_in_one_task_leaves_all_as_they_were(
    jobs: Jobs, tmp_path: Path, fault: Fault
) -> None:
    """One job lives through the fault at each of its passes."""
    fired, setting = jobs.states / "fired", tmp_path / "fault"
    setting.touch()
    two = Two(jobs, {"FLOWGPU_FAULT": f"@{setting}"}, engine="replay")
    failures = 0
    for nth in itertools.count(1):
        image = tmp_path / f"image{nth}"
        setting.write_text(f"{fault}:{nth}")
        try:
            two.job.dump(image, leave_running=True)
        except FlowError as error:
            assert isinstance(error, CheckpointFailed), (error, two.job.log)
            failures += 1
            two.goes_on(image)
        else:
            two.wait_steps(5)
            two.nothing_is_left()
            Image(image).verify()
        if not fired.exists():
            break
        fired.unlink()
        setting.write_text("")
        two.dump_again(tmp_path / f"second{nth}")
        assert engine_of(tmp_path / f"second{nth}")[0] == "replay"
    assert failures == 7  # ASK, ROOM, EXPORT, GATE, HANDOVER, STRIP, DETACH
    assert nth - 1 - failures == 3  # REBUILD, MAPBACK and OPEN are tried again


@pytest.mark.parametrize(
    ("fault", "passes"),
    [
        (Fault.STRIP, 2),
        (Fault.DETACH, 2),
        (Fault.CRIU_DUMP, 1),
        (Fault.COPY_WAIT, 1),
        (Fault.COMMIT, 1),
    ],
)
def test_a_checkpoint_that_fails_behind_the_strip_is_undone(
    jobs: Jobs, tmp_path: Path, fault: Fault, passes: int
) -> None:
    setting = tmp_path / "fault"
    setting.touch()
    two = Two(jobs, {}, engine="replay", coordinator_env={"FLOWGPU_FAULT": f"@{setting}"})
    for nth in range(1, passes + 1):
        setting.write_text(f"{fault}:{nth}")
        with pytest.raises(CheckpointFailed):
            two.job.dump(tmp_path / "image")
        two.goes_on(tmp_path / "image")
        setting.write_text("")
        two.dump_again(tmp_path / f"second{nth}")


def test_one_of_two_tasks_that_cannot_strip_gives_both_their_cuda_back(
    jobs: Jobs, tmp_path: Path
) -> None:
    two = Two(jobs, {"FAKE_TASK_FAIL": "STRIP:DRIVER:1"}, engine="replay")
    with pytest.raises(CheckpointFailed, match="STRIP: DRIVER"):
        two.job.dump(tmp_path / "image")
    two.goes_on(tmp_path / "image")
    two.dump_again(tmp_path / "second")


@pytest.mark.parametrize(
    ("fails", "message"), [("STRIP:LOST:1", "STRIP: LOST"), ("REBUILD:DRIVER:2", "REBUILD")]
)
def test_a_task_that_cannot_go_on_is_lost_and_said_to_be(
    jobs: Jobs, tmp_path: Path, fails: str, message: str
) -> None:
    two = Two(jobs, {"FAKE_TASK_FAIL": fails}, engine="replay")
    with pytest.raises(JobLost, match=message):
        two.job.dump(tmp_path / "image", leave_running=True)
    assert two.job.end() == 128 + 9
    assert not list(tmp_path.glob("image*"))
    assert not any("torn" in line for line in two.job.lines)


def test_a_rebuild_that_fails_once_is_tried_again(jobs: Jobs, tmp_path: Path) -> None:
    two = Two(jobs, {"FAKE_TASK_FAIL": "REBUILD:DRIVER:1"}, engine="replay")
    two.job.dump(tmp_path / "image", leave_running=True)
    two.wait_steps(5)
    two.nothing_is_left()
    Image(tmp_path / "image").verify()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_strip_that_takes_too_long_is_a_timeout(jobs: Jobs, tmp_path: Path, when: str) -> None:
    two = Two(jobs, {"FAKE_TASK_SLOW": f"STRIP:{when}:6"}, engine="replay")
    with pytest.raises(CheckpointTimeout, match="STRIP"):
        two.job.dump(tmp_path / "image", timeout=4.0)
    two.goes_on(tmp_path / "image")


@pytest.mark.parametrize("message", ["ASK", "STRIP", "REBUILD"])
def test_a_task_that_ends_takes_nobody_with_it(jobs: Jobs, tmp_path: Path, message: str) -> None:
    two = Two(jobs, {"FAKE_TASK_DIE": message}, engine="replay")
    image = tmp_path / "image"
    two.job.dump(image, leave_running=True)
    two.wait_steps(5, "b")
    two.nothing_is_left()
    assert len(Image(image).manifest.tasks) == (2 if message == "REBUILD" else 1)


def test_a_job_that_ends_in_its_strip_is_said_to_have_ended(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, engine="replay", task_env={"FAKE_TASK_DIE": "STRIP"})
    with pytest.raises(JobEnded):
        job.dump(tmp_path / "image")
    assert job.end() == 3


@pytest.mark.parametrize("free", [{}, {"FAKE_TASK_FREE": str(1 << 20)}], ids=["room", "full"])
def test_a_gpu_without_room_for_the_drivers_checkpoint_will_do(
    jobs: Jobs, tmp_path: Path, free: dict[str, str]
) -> None:
    job = jobs.task(3, engine="replay", task_env=free)
    for number in range(2):
        job.dump(tmp_path / f"image{number}", leave_running=True)
        job.wait_steps(5)
        assert Image(tmp_path / f"image{number}").manifest.ghost == ("late" if free else "cold")
    job.dump(tmp_path / "last")
    again = restores(jobs, tmp_path / "last")
    assert goes_on(again, tmp_path / "last"), again.log


@pytest.mark.parametrize("fault", [Fault.STRIP, Fault.CRIU_DUMP])
def test_a_late_ghost_gives_its_place_back(jobs: Jobs, tmp_path: Path, fault: Fault) -> None:
    two = Two(
        jobs,
        {"FAKE_TASK_FREE": str(1 << 20)},
        engine="replay",
        coordinator_env={"FLOWGPU_FAULT": f"{fault}:1"},
    )
    with pytest.raises(CheckpointFailed):
        two.job.dump(tmp_path / "image")
    two.goes_on(tmp_path / "image")


def test_images_in_a_row_share_and_come_back(jobs: Jobs, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    job = jobs.task(3, engine="replay", task_env={"FAKE_TASK_FILL": "own"})
    for _ in range(3):
        base = store.newest(job.spec.id)
        fields = {"base": str(base)} if base else {}
        result = job.dump(store.next_image(), leave_running=True, **fields)
        assert result["engine"] == "replay"
        assert bool(result["gpu_bytes_linked"]) == bool(base)
    job.kill()
    newest = store.newest(job.spec.id)
    assert newest is not None
    again = restores(jobs, newest)
    assert goes_on(again, newest), again.log


# Restores


@pytest.fixture
def image(jobs: Jobs, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An image of a job whose task has the environment that the test is parametrised with."""
    job = jobs.task(3, engine="replay", task_env=getattr(request, "param", {}))
    job.dump(tmp_path / "image")
    job.end()
    return tmp_path / "image"


def refusal(jobs: Jobs, image: Path, error: type[FlowError], **fields: str) -> str:
    """What the restore fails with; nothing of the job has run."""
    failed = jobs.restore(image, coordinator_env=fields)
    with pytest.raises(error) as found:
        failed.ask("wait-restored")
    failed.process.wait(SECONDS)
    assert not failed.lines
    assert not any(Path(f"/proc/{pid}").exists() for pid in Image(image).manifest.pids)
    return str(found.value)


def test_a_damaged_image_is_found_before_anything_runs(jobs: Jobs, image: Path) -> None:
    with open(image / "gpu0.data", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8)
    assert "gpu0.data" in refusal(jobs, image, ImageDamaged)


def test_a_restore_that_fails_at_the_rebuild_can_be_done_again(jobs: Jobs, image: Path) -> None:
    said = refusal(jobs, image, RestoreFailed, FLOWGPU_FAULT=f"{Fault.REBUILD}:1")
    assert "rebuild" in said
    again = restores(jobs, image)
    assert goes_on(again, image), again.log


@pytest.mark.parametrize("image", [{"FAKE_TASK_FAIL": "REBUILD:DRIVER:9"}], indirect=True)
def test_a_task_that_cannot_be_rebuilt_fails_the_restore(jobs: Jobs, image: Path) -> None:
    assert "REBUILD: DRIVER" in refusal(jobs, image, RestoreFailed)


@pytest.mark.parametrize("image", [{"FAKE_TASK_NAMESAKE": "1"}], indirect=True)
def test_a_task_whose_threads_cannot_be_held_is_rebuilt_after_the_fill(
    jobs: Jobs, image: Path
) -> None:
    again = restores(jobs, image)
    assert goes_on(again, image), again.log
    assert "put back when the memory is there" in again.log


@pytest.mark.parametrize("image", [{"FAKE_TASK_REBUILD_NEEDS_OTHERS": "1"}], indirect=True)
def test_a_rebuild_that_needs_a_held_thread_gets_it_after_the_fill(jobs: Jobs, image: Path) -> None:
    again = restores(jobs, image)
    assert goes_on(again, image), again.log


@pytest.mark.parametrize(
    "ghost_env", [{"FAKE_GPU_FREE": "1"}, {"FAKE_GPU_SALT": "7"}], ids=["full GPU", "another GPU"]
)
def test_another_place_will_do(jobs: Jobs, image: Path, ghost_env: dict[str, str]) -> None:
    again = restores(jobs, image, ghost_env=ghost_env | OLD)
    assert goes_on(again, image), again.log


ELSEWHERE = {"FAKE_GPU_SALT": "7", "FAKE_GPU_MODEL": "another"}


def test_another_model_of_enough_memory_will_do(jobs: Jobs, image: Path) -> None:
    again = restores(jobs, image, ghost_env=ELSEWHERE)
    assert goes_on(again, image), again.log


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_task_that_gets_another_gpu_is_told_which(
    elsewhere: bool, jobs: Jobs, tmp_path: Path
) -> None:
    image, told = tmp_path / "image", tmp_path / "told"
    jobs.task(2, engine="replay", task_env={"FAKE_TASK_TOLD": str(told)}).dump(image)
    (gpu,) = Image(image).manifest.gpus
    again = restores(jobs, image, ghost_env=ELSEWHERE if elsewhere else {})
    assert goes_on(again, image), again.log
    assert told.exists() == elsewhere  # on its own GPU it sees what it saw
    if elsewhere:
        assert re.fullmatch("GPU-[0-9a-f-]{36}", told.read_text()) and told.read_text() != gpu.uuid
