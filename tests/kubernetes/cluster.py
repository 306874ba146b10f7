"""A Kubernetes of one's own: a real kube-apiserver and etcd, and agents with the rights of
contrib/kubernetes. There is no kubelet: `Pod` starts and ends processes as one would."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from flowgpu.kubernetes.inside import first_processes
from tests.emu.test_checkpoint import ROOT, SECONDS
from tests.slurm.cluster import free_ports
from tests.unit.coordinator_job import wait_for

SHIPPED = ROOT / "contrib" / "kubernetes"
FETCHED = ROOT / ".tools" / "kubernetes"
PROGRAMS = ("kube-apiserver", "etcd", "kubectl")
SYSTEM_PROGRAMS = ("ip", "unshare", "openssl")
ACCOUNT = "/api/v1/namespaces/flowgpu/serviceaccounts/flowgpu-agent"
START_SECONDS = 120.0
Object = dict[str, Any]


def control_groups() -> Path | None:
    """Where processes can be put into groups: the unified hierarchy, else any."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, _, what = line.partition(" - ")
        kind = what.split()[0]
        if kind.startswith("cgroup") and "rw" in where.split()[5].split(","):
            found.setdefault(kind, Path(where.split()[4]))
    return found.get("cgroup2") or found.get("cgroup")


def missing() -> list[str]:
    """What lacks to run an API server, and processes as those of pods."""
    if os.geteuid() != 0:
        return ["root"]
    lacking = [name for name in PROGRAMS if not (FETCHED / name).exists()]
    lacking += [name for name in SYSTEM_PROGRAMS if not shutil.which(name)]
    lacking += ["kopf"] if importlib.util.find_spec("kopf") is None else []
    return lacking if control_groups() else [*lacking, "control group that can be written to"]


class Cluster:
    """The API server, what contrib/kubernetes installs in it, and the nodes `here`, `there` and
    `elsewhere`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._server: tuple[str, ...] = ()
        self._config = folder / "admin.json"

    def start(self) -> None:
        etcd, peers, port = free_ports(3)
        (self.folder / "tokens.csv").write_text('admin,admin,1,"system:masters"\n')
        key = self.folder / "accounts.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", key, "2048"], check=True, stderr=subprocess.DEVNULL
        )
        client, peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        self._daemon(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self._server = (
            f"--etcd-servers={client}",
            f"--cert-dir={self.folder}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
        )
        self._url = f"https://127.0.0.1:{port}"
        self._write_config(self._config, "admin")
        self.start_server()
        self.ask("apply", "-k", SHIPPED)
        self.ask("wait", "--for=condition=Established", "--timeout=60s", "-f", SHIPPED / "crd.yaml")
        for node in ("here", "there", "elsewhere"):
            self.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        token = json.loads(
            self.ask(
                *("create", "--raw", f"{ACCOUNT}/token", "-f", "-"),
                stdin='{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}',
            )
        )
        self._write_config(self.folder / "agent.json", token["status"]["token"])

    def _daemon(self, name: str, *options: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            daemon = subprocess.Popen(
                [str(FETCHED / name), *options], stdout=log, stderr=log, cwd=self.folder
            )
        self._daemons[name] = daemon

    def start_server(self) -> None:
        """The API server, which is ready then."""
        self._daemon("kube-apiserver", *self._server)
        wait_for(self._ready, "the API server", START_SECONDS)

    def kill_server(self) -> None:
        self._daemons["kube-apiserver"].kill()
        self._daemons["kube-apiserver"].wait()

    def _ready(self) -> bool:
        assert all(daemon.poll() is None for daemon in self._daemons.values()), self._said()
        ready = self.kubectl("get", "--raw", "/readyz").returncode == 0
        return ready and self.kubectl("get", "namespace", "default").returncode == 0

    def _said(self) -> str:
        logs = [self.folder / f"{name}.log" for name in PROGRAMS[:2]]
        return "".join(log.read_text()[-2000:] for log in logs)

    def _write_config(self, path: Path, token: str) -> None:
        cluster = {"server": self._url, "certificate-authority": f"{self.folder}/apiserver.crt"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))

    def kubectl(self, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(FETCHED / "kubectl"), f"--kubeconfig={self._config}", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )

    def ask(self, *arguments: object, stdin: str = "") -> str:
        done = self.kubectl(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {arguments}: {done.stderr}"
        return done.stdout

    def create(self, what: Object) -> Object:
        return cast(
            Object, json.loads(self.ask("create", "-f", "-", "-o", "json", stdin=json.dumps(what)))
        )

    def get(self, kind: str, name: str) -> Object | None:
        """None if there is none."""
        done = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        assert done.returncode == 0, done.stderr
        return cast(Object, json.loads(done.stdout)) if done.stdout else None

    def checkpoint(self, name: str, pod: str, **spec: object) -> None:
        """Make a PodCheckpoint."""
        self.create(
            {
                "apiVersion": "checkpoint.flowgpu.io/v1alpha1",
                "kind": "PodCheckpoint",
                "metadata": {"name": name},
                "spec": {"sourcePodName": pod, **spec},
            }
        )

    def status(self, name: str) -> Object:
        """What a PodCheckpoint says of itself."""
        found = self.get("podcheckpoint", name)
        assert found is not None, f"there is no PodCheckpoint {name}"
        return cast(Object, found.get("status", {}))

    def wait_over(self, name: str) -> Object:
        """The status of a PodCheckpoint that has ended."""

        def over() -> Object | None:
            status = self.status(name)
            return status if status.get("phase") in ("Ready", "Failed") else None

        return cast(Object, wait_for(over, f"the end of {name}", 2 * SECONDS))

    def set_pod_status(self, name: str, status: Object) -> None:
        path = f"/api/v1/namespaces/default/pods/{name}/status"
        whole = self.get("pod", name)
        assert whole is not None
        self.ask("replace", "--raw", path, "-f", "-", stdin=json.dumps(whole | {"status": status}))

    @contextlib.contextmanager
    def agent(self, node: str = "here") -> Iterator[Agent]:
        """An agent of this node, that has begun."""
        agent = Agent(self, node)
        try:
            wait_for(agent.begins, f"the agent, which says in {agent.log}", START_SECONDS)
            yield agent
        finally:
            agent.end()

    def close(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait()


class Agent:
    """A process of flowgpu.kubernetes, with the rights of its service account and no more."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.log = cluster.folder / f"agent-{secrets.token_hex(4)}.log"
        environment = {
            **os.environ,
            "KUBECONFIG": str(cluster.folder / "agent.json"),
            "NODE_NAME": node,
        }
        environment.pop("FLOWGPU_RUNTIME_DIR", None)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flowgpu.kubernetes"],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def begins(self) -> bool:
        assert self.process.poll() is None, self.said
        return "the agent of node" in self.said

    def end(self, signum: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        self.process.wait(SECONDS)


class Pod:
    """A pod, and its containers' processes, as a kubelet of its node would have them.

    A container has control group, namespaces and /run of its own, and the files of this machine. It
    ends as one does: by SIGTERM, and SIGKILL after the grace. Unlike those of a pod, containers do
    not share a network: names of the emulated GPU's clients are those of their process ids.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        containers: dict[str, list[str]],
        folder: Path,
        *,
        node: str = "here",
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        **environment: str,
    ) -> None:
        self.cluster, self.name, self._folder = cluster, name, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        made = cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": labels or {},
                    "annotations": annotations or {},
                },
                "spec": {
                    "nodeName": node,
                    "containers": [
                        {"name": one, "image": "job", "command": words}
                        for one, words in containers.items()
                    ],
                },
            }
        )
        self.uid = made["metadata"]["uid"]
        self._ids = {one: secrets.token_hex(32) for one in containers}
        groups = control_groups()
        assert groups
        scope = self.uid.replace("-", "_")
        self._group = groups / f"kubepods-flowgpu-test-pod{scope}.slice"
        for one, words in containers.items():
            self._start(one, words, environment)
        statuses = [
            {
                "name": one,
                "containerID": f"containerd://{number}",
                "image": "job",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {}},
            }
            for one, number in self._ids.items()
        ]
        cluster.set_pod_status(name, {"phase": "Running", "containerStatuses": statuses})

    def _start(self, name: str, words: list[str], environment: dict[str, str]) -> None:
        group = self._group / f"cri-containerd-{self._ids[name]}.scope"
        group.mkdir(parents=True)
        steps = ("mount -t tmpfs tmpfs /run", "ip link set lo up", f"echo 0 > {group}/cgroup.procs")
        script = " && ".join((*steps, 'exec "$@"'))
        outer = {**os.environ, **environment}
        outer.pop("FLOWGPU_RUNTIME_DIR", None)
        entering = (
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--fork",
            "--kill-child",
        )
        with (
            open(self.out(name), "ab") as out,
            open(self._folder / f"{name}.err", "ab") as err,
        ):
            self.processes[name] = subprocess.Popen(
                [*entering, "--mount-proc", "/bin/sh", "-c", script, "sh", *words],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=outer,
            )
        wait_for(lambda: self._ids[name] in first_processes(self.uid), "the container", SECONDS)

    def out(self, name: str) -> Path:
        return self._folder / f"{name}.out"

    def said(self, name: str) -> str:
        """What the container's first process says beside its job."""
        return (self._folder / f"{name}.err").read_text()

    def wait_lines(self, name: str, count: int) -> None:
        """For so many lines of a container."""
        process = self.processes[name]
        wait_for(
            lambda: (
                len(self.out(name).read_text().splitlines()) >= count or process.poll() is not None
            ),
            f"{count} lines",
            SECONDS,
        )
        assert process.poll() is None, self.said(name)

    def first(self, name: str) -> int:
        """The first process of a container."""
        return first_processes(self.uid)[self._ids[name]]

    def end(self, grace: float = SECONDS) -> dict[str, int]:
        """End the containers as a kubelet does at a deletion. Gives their exit codes."""
        for name in self.processes:
            with contextlib.suppress(KeyError, ProcessLookupError):  # it has ended by itself
                os.kill(self.first(name), signal.SIGTERM)
        codes = {name: process.wait(grace) for name, process in self.processes.items()}
        self.remove()
        return codes

    def remove(self) -> None:
        """End what runs at once, and forget the pod."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.cluster.kubectl("delete", "pod", self.name, "--force", "--grace-period=0")
        if self._group.exists():
            wait_for(lambda: not first_processes(self.uid), "the end of its processes", SECONDS)
            for group in self._group.iterdir():
                if group.is_dir():
                    removed(group.rmdir)
            removed(self._group.rmdir)


def removed(remove: Callable[[], None]) -> None:
    """A group whose last process ends right now is busy for a moment."""

    def done() -> bool:
        with contextlib.suppress(OSError):
            remove()
            return True
        return False

    wait_for(done, "the end of a group", SECONDS)


if __name__ == "__main__":
    sys.exit(bool(missing()))
