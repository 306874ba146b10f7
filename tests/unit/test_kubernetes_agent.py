"""What an agent of a Kubernetes node makes of control groups, objects and taints."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("kopf")

from flowgpu.errors import Busy, all_errors
from flowgpu.kubernetes import AT_TAINT, agent, api, enter
from flowgpu.kubernetes.agent import Taking, leaving
from flowgpu.kubernetes.inside import (
    Container,
    Failed,
    Job,
    container_id,
    container_ids,
    error_name,
    first_processes,
)
from tests.unit.coordinator_job import wait_for

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OTHER = "1f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
ID = "ab" * 32
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    "line",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{ID}.scope",
        f"0::/kubepods.slice/{SLICE}/crio-{ID}.scope/container",
        f"0::/kubepods/burstable/pod{UID}/{ID}",
        f"12:pids:/kubepods/pod{UID}/{ID}/inner",
        f"1:cpu:/\n0::/../../pod{UID}/{ID}",
    ],
)
def test_a_container_is_known_by_the_control_group_of_its_processes(line: str) -> None:
    assert container_id(line, UID) == ID
    assert container_id(line, OTHER) is None


@pytest.mark.parametrize(
    "line",
    [
        "0::/",
        "0::/user.slice/session-1.scope",
        f"0::/kubepods.slice/{SLICE}",
        f"0::/kubepods.slice/{SLICE}/crio-conmon-{ID}.scope",
    ],
)
def test_what_is_in_no_container_of_the_pod_is_none_of_its_processes(line: str) -> None:
    assert container_id(line, UID) is None


def test_of_a_containers_processes_the_first_to_start_is_taken(tmp_path: Path) -> None:
    """Those of `kubectl exec` have begun later, and ids tell nothing."""
    own = Path("/proc/self").resolve().name
    for pid in (own, "1"):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")
    (tmp_path / "meminfo").touch()
    (tmp_path / "99999999").mkdir()  # has ended meanwhile
    assert first_processes(UID, tmp_path) == {ID: 1}


def test_a_process_that_has_ended_is_not_the_first(tmp_path: Path) -> None:
    """A zombie is in its group until its parent has waited for it."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        for pid in (ended.pid, os.getpid()):
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")
        assert first_processes(UID, tmp_path) == {ID: os.getpid()}


def test_the_exit_codes_of_entering_a_container_are_no_errors_of_flowgpu() -> None:
    codes = {cls.exit_code for cls in all_errors()}
    assert not codes & {enter.NOT_FOUND, enter.ENDED}
    assert enter.main(["999999999", "true"]) == enter.ENDED


ROOT = Path(__file__).resolve().parents[2]
ENTER = [sys.executable, "-m", "flowgpu.kubernetes.enter"]
SHOW = "id -u; id -g; grep CapBnd /proc/self/status; echo $WORD; readlink /proc/1/ns/pid; pwd"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter another namespace")
@pytest.mark.parametrize("user", [0, 1234])
def test_a_program_in_a_container_has_its_rights_and_no_more(user: int, tmp_path: Path) -> None:
    limits = ["setpriv", "--bounding-set=-all,+net_admin", "--inh-caps=-all", "--clear-groups"]
    inside = [*limits, f"--reuid={user}", f"--regid={user}", "sh", "-c", "echo here; read word"]
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*spaces, *inside],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "WORD": "of the container"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as container:
        assert container.stdout and container.stdout.readline()
        (first,) = psutil.Process(container.pid).children()
        done = subprocess.run(
            [*ENTER, str(first.pid), "sh", "-c", SHOW],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        missing = subprocess.run([*ENTER, str(first.pid), "no-such-program"], cwd=ROOT, check=False)
        space = os.readlink(f"/proc/{first.pid}/ns/pid")
        container.kill()
    shown = [str(user), str(user), f"CapBnd:\t{1 << 12:016x}", "of the container", space, "/"]
    assert done.stdout.splitlines() == shown, done.stderr
    assert missing.returncode == enter.NOT_FOUND


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
def test_links_of_a_container_lead_to_its_own_folders(tmp_path: Path) -> None:
    (tmp_path / "images" / "store").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to("/images")
    (tmp_path / "upwards").symlink_to("../../../../images")
    (tmp_path / "outside").symlink_to(ROOT)
    child = os.fork()
    if child == 0:
        os.chroot(tmp_path)
        signal.pause()
    try:
        wait_for(lambda: os.readlink(f"/proc/{child}/root") == str(tmp_path), "its root")
        container = Container("main", child)
        for folder in ("/images/store", "/absolute/store", "/upwards/store", "/../images/store"):
            fd = container.open(folder)
            assert os.path.samestat(os.fstat(fd), (tmp_path / "images" / "store").stat()), folder
            os.close(fd)
        for folder in ("/outside", str(ROOT), "/absolute/none"):
            with pytest.raises(Failed, match=f"has no folder {folder}: No such file"):
                container.open(folder)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_only_containers_that_run_have_jobs() -> None:
    statuses = [
        {"name": "main", "containerID": f"containerd://{ID}", "state": {"running": {}}},
        {"name": "ended", "containerID": "containerd://cd", "state": {"terminated": {}}},
        {"name": "waits", "state": {"waiting": {}}},
    ]
    assert container_ids({"status": {"containerStatuses": statuses}}) == {"main": ID}
    assert container_ids({}) == {}


def test_an_exit_code_names_the_error() -> None:
    assert error_name(Busy.exit_code) == "Busy"
    assert error_name(1) == "FlowError"
    codes = [cls.exit_code for cls in all_errors()]
    assert len(codes) == len(set(codes))


def pod(name: str, keys: str | None, phase: str = "Running", **metadata: str) -> dict:
    annotations = {} if keys is None else {"annotations": {AT_TAINT: keys}}
    made = {"name": name, "namespace": "ns", "uid": f"uid of {name}", **annotations, **metadata}
    return {"metadata": made, "status": {"phase": phase}}


def test_pods_leave_at_the_taints_that_they_name() -> None:
    pods = [
        pod("stays", None),
        pod("other", "other/taint"),
        pod("empty", ""),
        pod("leaves", "other/taint, spot/going"),
        pod("ended", "spot/going", phase="Succeeded"),
        pod("ends", "spot/going", deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    (found,) = leaving(pods, {"spot/going", "nvidia.com/gpu"})
    assert found["spec"] == {"sourcePodName": "leaves", "postCheckpointState": "Stopped"}
    assert found["metadata"]["namespace"] == "ns"
    assert list(leaving(pods, {"spot/going"})) == [found]  # the same name, by each agent
    assert not list(leaving(pods, {""}))
    assert not list(leaving(pods, set()))


def test_another_pod_of_the_same_name_leaves_by_itself() -> None:
    names = {
        one["metadata"]["name"]
        for uid in ("1", "2")
        for one in leaving([pod("train", "going", uid=uid)], {"going"})
    }
    assert len(names) == 2


class Commands:
    """A container whose commands end with these reasons, one after another, and then well."""

    def __init__(self, image: Path, *reasons: str, written: bool = False) -> None:
        self.image, self.reasons, self.written = image, list(reasons), written
        self.asked = 0

    async def jobs(self) -> list[Job]:
        return []

    async def dump(self, *_: object, **__: object) -> None:
        self.asked += 1
        if self.written:
            self.image.mkdir(exist_ok=True)
        if self.reasons:
            raise Failed(self.reasons.pop(0), "words")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(agent, "RETRY_SECONDS", 0)
    return tmp_path / "000001-20261127T150000Z"


def dump(commands: Commands, *, begun: bool = False) -> bool:
    taking = Taking(None, "here", {}, "ns", "name", "uid")  # type: ignore[arg-type]
    job = Job("train", "running", None)
    return asyncio.run(taking._dump(commands, job, "/images/x", commands.image, begun))  # type: ignore[arg-type]


def test_a_command_that_ends_with_its_container_has_written_the_image(image: Path) -> None:
    assert dump(Commands(image, "CoordinatorGone", written=True))
    with pytest.raises(Failed, match="words"):
        dump(Commands(image.with_name("other"), "CoordinatorGone"))


def test_an_image_of_another_job_that_is_written_is_waited_for(image: Path) -> None:
    commands = Commands(image, "Busy", "CoordinatorReplaced", "Busy")
    assert dump(commands)
    assert commands.asked == 4


def test_a_name_that_the_job_has_given_an_image_of_its_own_is_not_taken(image: Path) -> None:
    image.mkdir()
    assert not dump(Commands(image, "OutputNotEmpty"))


def test_an_image_that_an_agent_before_has_asked_for_is_taken(image: Path) -> None:
    image.mkdir()
    commands = Commands(image)
    assert dump(commands, begun=True)
    assert commands.asked == 0
    image.rmdir()
    assert dump(Commands(image, "OutputNotEmpty", written=True), begun=True)


class Answers(api.Api):
    """An API server that answers with these, one after another."""

    def __init__(self, *answers: object) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        self._answers = list(answers)

    async def _once(self, *_: object) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_api_server_that_is_away_or_starts_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE", 0)
    passing = [api.ApiError(status, "words") for status in (503, 401, 403, 429)]
    found = asyncio.run(Answers(TimeoutError(), *passing, {"kind": "Pod"}).get("/x"))
    assert found == {"kind": "Pod"}


@pytest.mark.parametrize("status", [404, 409, 422])
def test_what_an_api_server_refuses_is_not_asked_again(status: int) -> None:
    with pytest.raises(api.ApiError, match="words"):
        asyncio.run(Answers(api.ApiError(status, "words")).get("/x"))


def test_rights_that_stay_away_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE", 0)
    monkeypatch.setattr(api, "STARTING_SECONDS", 0.0)
    with pytest.raises(api.ApiError, match="words"):
        asyncio.run(Answers(*(api.ApiError(403, "words") for _ in range(3))).get("/x"))


class Server(api.Api):
    """A PodCheckpoint and its pod. The status is written by others first, so many times."""

    def __init__(self, others: int) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        self.others, self.version, self.status = others, 1, {}

    async def get(self, path: str, **query: str) -> Any:
        if path == agent.pod_path("ns", "train"):
            return pod("train", None) | {"spec": {"nodeName": "here"}}
        metadata = {"uid": "uid", "resourceVersion": str(self.version)}
        return {"metadata": metadata, "spec": {"sourcePodName": "train"}, "status": self.status}

    async def merge(self, path: str, body: Any) -> Any:
        assert path == agent.path_of("ns", "name") + "/status"
        if self.others:
            self.others -= 1
            self.version += 1
        if body["metadata"].get("resourceVersion", str(self.version)) != str(self.version):
            raise api.ApiError(agent.CONFLICT, "it was modified")
        self.status = self.status | body["status"]
        return {"status": self.status}


@pytest.mark.parametrize("others", [0, 2])
def test_an_object_that_somebody_else_changes_is_claimed_all_the_same(others: int) -> None:
    server = Server(others)
    asyncio.run(Taking(server, "here", {}, "ns", "name", "uid").run())
    assert server.status["attempts"] == 1
    assert [one["reason"] for one in server.status["conditions"]] == ["NoJob", "NoJob"]


def test_an_object_that_three_agents_have_ended_with_is_not_tried_again() -> None:
    server = Server(0)
    server.status = {"phase": "InProgress", "nodeName": "here", "attempts": 3}
    asyncio.run(Taking(server, "here", {}, "ns", "name", "uid").run())
    assert server.status["phase"] == "Failed"
    assert server.status["conditions"][0]["reason"] == "AgentEnded"


def test_an_object_whose_pod_was_replaced_is_no_object_of_the_new_one() -> None:
    server = Server(0)
    server.status = {"phase": "InProgress", "nodeName": "here", "podUID": "another"}
    asyncio.run(Taking(server, "here", {}, "ns", "name", "uid").run())
    assert server.status["conditions"][0]["reason"] == "PodEnded"
