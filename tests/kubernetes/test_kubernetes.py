"""PodCheckpoints of a real kube-apiserver, taken by the agent of a node. No kubelet runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowgpu.errors import DUMPED_EXIT
from flowgpu.host.proctree import inner_pid, tree_pids
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.kubernetes import AT_TAINT, LAST_BYTES, LAST_TIME, NOTED, VOLCANO_LAST_TIME, enter
from tests.emu.test_checkpoint import (
    ROOT,
    SECONDS,
    STEPS,
    command,
    emulated_machine,
    undisturbed,
)
from tests.kubernetes.cluster import SHIPPED, Agent, Cluster, Pod, missing
from tests.unit.coordinator_job import wait_for
from workloads._common import LAST_STEPS

absent = missing()
pytestmark = [
    pytest.mark.skipif(
        bool(absent), reason=f"Kubernetes cannot be tried here: no {', '.join(absent)}"
    ),
    pytest.mark.timeout(6 * SECONDS),
]
WORDS = command("digits_mlp")
PAGE = ROOT / "docs" / "kubernetes.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="kubernetes-") as folder:
        found = Cluster(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[Agent]:
    with cluster.agent() as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Lines of a run that nobody disturbed."""
    with emulated_machine():
        return undisturbed("digits_mlp")


class Training:
    """Pods of one command line, whose output goes on in the same files."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.name = f"train-{os.urandom(4).hex()}"
        self.images, self.hurrying = folder / "images", folder / "hurry"
        self.store = Store(self.images / "train")
        self.images.mkdir()
        program = folder / "bin" / "flowgpu"
        program.parent.mkdir()
        program.write_text(
            f"#!{sys.executable}\n"
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from flowgpu.cli import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
        self.stored = ("--store", str(self.images), "--resume", "--on-signal", "TERM=dump")
        self._path = f"{program.parent}:{os.environ['PATH']}"
        self.pods: list[Pod] = []

    def words(self, *options: str, name: str = "train") -> list[str]:
        """`flowgpu run`, by these options in the place of a store and what is done with it."""
        kept = options or self.stored
        return ["flowgpu", "run", "--name", name, "--gpu", "emulated", *kept, "--", *WORDS]

    def start(self, *options: str, **more: Any) -> Pod:
        """A pod with one container, `main`, once its job has said some more lines."""
        return self.start_all({"main": self.words(*options)}, **more)

    def start_all(self, containers: dict[str, list[str]], **more: Any) -> Pod:
        """`more`: of a Pod, and variables of its containers."""
        most = STEPS - LAST_STEPS + 1  # all that it says until it is hurried
        wanted = {name: min(len(self.lines(name)) + 3, most) for name in containers}
        variables = {"PATH": self._path, "WORKLOAD_HURRY": str(self.hurrying)}
        pod = Pod(self.cluster, self.name, containers, self.folder, **variables, **more)
        self.pods.append(pod)
        for name in containers:
            pod.wait_lines(name, wanted[name])
        return pod

    def lines(self, name: str = "main") -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.out").read_text().splitlines()
        return []

    def ends_as(self, expected: list[str], name: str = "main") -> None:
        """The job runs, and says what one says that nobody has disturbed."""
        self.hurrying.touch()
        pod = self.pods[-1]
        assert pod.processes[name].wait(SECONDS) == 0, pod.said(name)
        assert self.lines(name) == expected

    def close(self) -> None:
        for pod in self.pods:
            pod.remove()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[Training]:
    found = Training(cluster, tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_a_pod_is_checkpointed_while_it_runs(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    training.start()
    cluster.checkpoint("one", training.name)
    cluster.ask("wait", "--for=condition=Ready", "--timeout=300s", "podcheckpoint/one")
    status = cluster.wait_over("one")
    assert status["phase"] == "Ready", status
    (image,) = training.store.names()
    location = str(training.store.path / image)
    manifest = Image(training.store.path / image).manifest
    written = {
        "checkpointLocation": location,
        "sizeBytes": manifest.counts.image_bytes,
        "pauseSeconds": status["pauseSeconds"],
    }
    assert status["nodeName"] == "here" and status["attempts"] == 1
    assert status["containers"] == [{"name": "main", "job": "train", **written}]
    assert status | written == status
    assert 0 < status["pauseSeconds"] < SECONDS
    said = {one["type"]: one["status"] for one in status["conditions"]}
    assert said == {"Ready": "True", "Failed": "False"}
    pod = cluster.get("pod", training.name)
    assert pod
    noted = pod["metadata"]["annotations"]
    assert noted[LAST_TIME] == noted[VOLCANO_LAST_TIME] == manifest.created
    assert noted[LAST_BYTES] == str(status["sizeBytes"])
    training.ends_as(expected)


def test_a_pod_that_is_stopped_goes_on_in_the_next_one(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    pod = training.start()
    cluster.checkpoint("stopped", training.name, postCheckpointState="Stopped")
    status = cluster.wait_over("stopped")
    assert status["phase"] == "Ready", status
    assert status["sizeBytes"] > 0 and status["pauseSeconds"] > 0
    wait_for(lambda: is_leaving(cluster, training.name), "the end of the pod", SECONDS)
    assert pod.end() == {"main": DUMPED_EXIT}
    assert len(training.lines()) < len(expected)
    training.start()
    training.ends_as(expected)
    assert f"goes on from {status['checkpointLocation']}" in training.pods[-1].said("main")


def is_leaving(cluster: Cluster, name: str) -> bool:
    pod = cluster.get("pod", name)
    return pod is None or "deletionTimestamp" in pod["metadata"]


def test_a_pod_that_is_deleted_dumps_itself_within_its_grace(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    """The kubelet sends SIGTERM to the first process of a container: no hook is needed."""
    assert training.start().end() == {"main": DUMPED_EXIT}
    training.start()
    training.ends_as(expected)


def test_a_hook_dumps_a_job_whose_shell_passes_no_signal_on(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    """The kubelet runs the hook in the container before it sends SIGTERM, which a shell ignores."""
    (hook,) = re.findall(r'command: \[sh, -c, "(.*)"\]', PAGE.read_text())
    inner = shlex.join(training.words())
    words = ["/bin/sh", "-c", f"{inner}; exit $?"]
    pod = training.start_all({"main": words})
    entering = [sys.executable, "-m", enter.__name__, str(pod.first("main"))]
    subprocess.run([*entering, "sh", "-c", hook], cwd=ROOT, check=False, timeout=SECONDS)
    assert pod.end() == {"main": DUMPED_EXIT}
    training.start_all({"main": words})
    training.ends_as(expected)


def test_images_go_where_the_object_says(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    """A job without a store of its own goes on from there if its pod is lost."""
    training.start("--ghost", "auto")
    cluster.checkpoint("nowhere", training.name)
    assert failure(cluster.wait_over("nowhere")) == (
        "NoLocation",
        "job train was started without --store: give spec.location",
    )
    cluster.checkpoint("located", training.name, location=f"{training.images}/")
    status = cluster.wait_over("located")
    assert status["checkpointLocation"] == str(training.store.path / training.store.names()[0])
    training.pods.pop().remove()
    before = len(training.lines())
    training.start()
    training.hurrying.touch()
    assert training.pods[-1].processes["main"].wait(SECONDS) == 0, training.pods[-1].said("main")
    after = training.lines()[before:]
    assert after and after == expected[-len(after) :]


def failure(status: dict) -> tuple[str, str]:
    """Reason and message of one that has failed."""
    assert status["phase"] == "Failed", status
    said = {one["type"]: one for one in status["conditions"]}
    assert (said["Ready"]["status"], said["Failed"]["status"]) == ("False", "True")
    return said["Failed"]["reason"], said["Failed"]["message"]


def test_each_container_and_each_of_its_jobs_has_an_image(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    kept = ("--store", str(training.images))
    names = ("first", "second")
    training.start_all({name: training.words(*kept, name=name) for name in names})
    cluster.checkpoint("all", training.name)
    status = cluster.wait_over("all")
    assert status["phase"] == "Ready", status
    rows = status["containers"]
    assert [(row["name"], row["job"]) for row in rows] == [(name, name) for name in names]
    assert status["sizeBytes"] == sum(row["sizeBytes"] for row in rows)
    cluster.checkpoint("second", training.name, containers=["second"])
    status = cluster.wait_over("second")
    assert [row["name"] for row in status["containers"]] == ["second"]
    cluster.checkpoint("third", training.name, containers=["third"])
    assert failure(cluster.wait_over("third"))[0] == "ContainerNotRunning"
    for name in names:
        training.ends_as(expected, name)


def test_a_failure_has_the_words_of_flowgpu_and_is_not_tried_again(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    """The fault comes once: another try would go well."""
    training.start(FLOWGPU_FAULT="criu_dump:1")
    cluster.checkpoint("fault", training.name)
    status = cluster.wait_over("fault")
    reason, message = failure(status)
    assert reason == "CheckpointFailed"
    assert "train" in message and "CAPTURE" in message
    assert not training.store.names() and status["attempts"] == 1
    cluster.checkpoint("after-fault", training.name)
    assert cluster.wait_over("after-fault")["phase"] == "Ready"
    assert len(training.store.names()) == 1
    assert cluster.status("fault") == status
    training.ends_as(expected)


def test_without_a_pod_or_a_job_or_a_folder_the_status_says_so(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    cluster.checkpoint("missing", "no-such-pod")
    reason, message = failure(cluster.wait_over("missing"))
    assert (reason, "no-such-pod" in message) == ("PodNotFound", True)
    training.start()
    cluster.checkpoint("no-folder", training.name, location="/no/such/folder")
    reason, message = failure(cluster.wait_over("no-folder"))
    assert reason == "StoreUnusable" and "/no/such/folder" in message
    assert not Path("/no").exists()
    training.ends_as(expected)
    training.pods.pop().remove()
    go = training.folder / "go"
    script = f"for line in 1 2 3; do echo $line; done; until [ -e {go} ]; do sleep 0.1; done"
    training.start_all({"other": ["/bin/sh", "-c", script]})
    cluster.checkpoint("no-job", training.name)
    assert failure(cluster.wait_over("no-job"))[0] == "NoJob"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "sourcePodName"),
        ({"sourcePodName": "train", "location": "images"}, "location"),
        ({"sourcePodName": "train", "postCheckpointState": "Ended"}, "postCheckpointState"),
        ({"sourcePodName": "train", "timeoutSeconds": 0}, "timeoutSeconds"),
    ],
)
def test_what_an_object_cannot_say_is_refused_at_once(
    cluster: Cluster, spec: dict, said: str
) -> None:
    made = {"apiVersion": "checkpoint.flowgpu.io/v1alpha1", "kind": "PodCheckpoint"}
    text = json.dumps({**made, "metadata": {"name": "bad"}, "spec": spec})
    done = cluster.kubectl("create", "--validate=false", "-f", "-", stdin=text)
    assert done.returncode != 0
    assert f"spec.{said}" in done.stderr


def test_images_that_a_job_writes_by_itself_are_noted(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    training.start("--store", str(training.images), "--every", "0.5", labels={NOTED: "true"})

    def noted() -> str:
        pod = cluster.get("pod", training.name)
        assert pod
        return pod["metadata"].get("annotations", {}).get(LAST_TIME, "")

    first = wait_for(noted, "the note of an image", SECONDS)
    wait_for(lambda: noted() > first, "the note of a newer one", SECONDS)
    training.ends_as(expected)


def test_two_objects_for_one_pod_get_an_image_each(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    training.start()
    for name in ("left", "right"):
        cluster.checkpoint(name, training.name)
    found = [cluster.wait_over(name) for name in ("left", "right")]
    assert [status["phase"] for status in found] == ["Ready", "Ready"], found
    locations = {status["checkpointLocation"] for status in found}
    assert locations == {str(training.store.path / name) for name in training.store.names()}
    assert len(locations) == 2
    training.ends_as(expected)


@contextlib.contextmanager
def held(pod: Pod) -> Iterator[None]:
    """While entered, the job's coordinator stands still, and so does every checkpoint."""
    first = pod.first("main")
    (record,) = Path(f"/proc/{first}/root/run/flowgpu/jobs").glob("*/job.json")
    wanted = json.loads(record.read_text())["coordinator_pid"]
    (coordinator,) = (pid for pid in tree_pids(first) if inner_pid(pid) == wanted)
    os.kill(coordinator, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(coordinator, signal.SIGCONT)


def wait_planned(cluster: Cluster, name: str) -> None:
    """For the moment before the image is asked for."""
    wait_for(lambda: cluster.status(name).get("containers"), f"the plan of {name}", SECONDS)


def test_an_object_that_is_deleted_leaves_the_job_and_its_image_whole(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    pod = training.start()
    with held(pod):
        cluster.checkpoint("deleted", training.name)
        wait_planned(cluster, "deleted")
        cluster.ask("delete", "podcheckpoint", "deleted")
        assert cluster.get("podcheckpoint", "deleted") is None
    wait_for(training.store.names, "the image", SECONDS)
    wait_for(lambda: "default/deleted was deleted" in agent.said, "the agent", SECONDS)
    cluster.checkpoint("deleted", training.name)
    assert cluster.wait_over("deleted")["phase"] == "Ready"
    first, second = training.store.names()
    training.ends_as(expected)
    for name in (first, second):
        assert Image(training.store.path / name).manifest.job.name == "train"


@pytest.mark.parametrize("client", ["lives", "dies"])
def test_an_agent_goes_on_where_another_has_ended(
    cluster: Cluster, training: Training, expected: list[str], client: str
) -> None:
    """The command that it had started may have ended with it, as where its container was killed."""
    node = "elsewhere"  # where no other agent is
    pod, name = training.start(node=node), f"taken-up-{client}"
    with cluster.agent(node) as first, held(pod):
        cluster.checkpoint(name, training.name)
        wait_planned(cluster, name)
        children = psutil.Process(first.process.pid).children(recursive=True)
        first.end(signal.SIGKILL)
        for child in children if client == "dies" else ():
            child.kill()
        assert cluster.status(name)["phase"] == "InProgress"
    with cluster.agent(node):
        status = cluster.wait_over(name)
    assert (status["phase"], status["attempts"]) == ("Ready", 2), json.dumps(status)
    assert [str(training.store.path / one) for one in training.store.names()] == [
        status["checkpointLocation"]
    ]
    training.ends_as(expected)


def test_an_agent_tells_what_it_did_while_the_server_was_away(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str]
) -> None:
    pod = training.start()
    with held(pod):
        cluster.checkpoint("told-later", training.name)
        wait_planned(cluster, "told-later")
        cluster.kill_server()
    try:
        wait_for(training.store.names, "the image", SECONDS)
    finally:
        cluster.start_server()
    status = cluster.wait_over("told-later")
    assert (status["phase"], status["attempts"]) == ("Ready", 1), json.dumps(status)
    cluster.checkpoint("as-before", training.name)
    assert cluster.wait_over("as-before")["phase"] == "Ready"
    training.ends_as(expected)


def test_an_agent_leaves_pods_of_other_nodes_to_theirs(
    cluster: Cluster, agent: Agent, training: Training
) -> None:
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
    containers = [{"name": "main", "image": "job"}]
    cluster.create({**made, "spec": {"nodeName": "there", "containers": containers}})
    cluster.checkpoint("for-there", "other")
    training.start()
    cluster.checkpoint("for-here", training.name)
    assert cluster.wait_over("for-here")["phase"] == "Ready"
    assert cluster.status("for-there") == {}
    with cluster.agent("there"):
        status = cluster.wait_over("for-there")
    assert status["nodeName"] == "there"
    assert failure(status)[0] == "NoJob"


def test_pods_that_ask_for_it_leave_a_node_with_a_taint(
    cluster: Cluster, agent: Agent, training: Training, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Training(cluster, tmp_path / "other")
    try:
        staying = other.start()
        leaving = training.start(annotations={AT_TAINT: "example.com/spot-ends"})
        cluster.ask("taint", "node", "here", "example.com/spot-ends=soon:NoSchedule")
        try:
            wait_for(lambda: is_leaving(cluster, training.name), "the pod", 2 * SECONDS)
        finally:
            cluster.ask("taint", "node", "here", "example.com/spot-ends-")
        assert leaving.end() == {"main": DUMPED_EXIT}
        asked = json.loads(cluster.ask("get", "podcheckpoints", "-o", "json"))["items"]
        ours = [one for one in asked if one["metadata"].get("annotations", {}).get(AT_TAINT)]
        assert [one["spec"]["sourcePodName"] for one in ours] == [training.name]
        assert ours[0]["status"]["phase"] == "Ready"
        assert not is_leaving(cluster, other.name) and staying.processes["main"].poll() is None
        training.start()
        training.ends_as(expected)
        other.ends_as(expected)
    finally:
        other.close()


@pytest.mark.parametrize(
    ("verb", "what", "may"),
    [
        ("get", "pods", "yes"),
        ("create", "podcheckpoints.checkpoint.flowgpu.io", "yes"),
        ("get", "secrets", "no"),
        ("create", "pods", "no"),
        ("create", "pods/exec", "no"),
        ("delete", "podcheckpoints.checkpoint.flowgpu.io", "no"),
        ("patch", "nodes", "no"),
    ],
)
def test_an_agent_may_do_what_it_needs_alone(
    cluster: Cluster, verb: str, what: str, may: str
) -> None:
    account = "--as=system:serviceaccount:flowgpu:flowgpu-agent"
    assert cluster.kubectl("auth", "can-i", verb, what, account).stdout.strip() == may


def test_the_shipped_job_is_one(cluster: Cluster) -> None:
    cluster.ask("create", "--dry-run=server", "-f", SHIPPED / "job.yaml")
