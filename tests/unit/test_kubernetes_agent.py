"""What an agent of a Kubernetes node makes of control groups, objects and taints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("kopf")

from flowgpu.errors import Busy, all_errors
from flowgpu.kubernetes import AT_TAINT, enter
from flowgpu.kubernetes.agent import leaving
from flowgpu.kubernetes.inside import container_id, container_ids, error_name, first_processes

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
