"""What the agent looks at: PodCheckpoints of all namespaces, by kopf, and its own node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any
from weakref import WeakValueDictionary

import kopf

from flowgpu.kubernetes import GROUP, PLURAL, VERSION
from flowgpu.kubernetes.agent import FAILED, READY, Node, Noting, Taking
from flowgpu.kubernetes.api import Api

log = logging.getLogger(__name__)

NODE_SECONDS = 5.0
"""Between two looks at the node: a cloud says 30 s before that it takes a machine away."""
NOTING_SECONDS = 30.0
WATCH_SECONDS = 300


def register(registry: kopf.OperatorRegistry, node: str) -> None:
    """Let an operator of this registry be the agent of this node."""
    takings: dict[str, asyncio.Task[None]] = {}
    locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
    others: set[asyncio.Task[None]] = set()

    @kopf.on.login(registry=registry)
    def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
        return logged_in(settings)

    @kopf.on.startup(registry=registry)
    async def begin(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
        settings.posting.enabled = False
        settings.watching.server_timeout = WATCH_SECONDS
        settings.watching.client_timeout = WATCH_SECONDS + 30
        memo.api = Api(lambda: logged_in(settings))
        for looks, seconds in ((Node, NODE_SECONDS), (Noting, NOTING_SECONDS)):
            others.add(asyncio.create_task(watch(looks(memo.api, node), seconds)))
        log.info("the agent of node %s begins", node)

    @kopf.on.cleanup(registry=registry)
    async def end(memo: kopf.Memo, **_: Any) -> None:
        # Checkpoints go on in their jobs; the next agent finds what became of them.
        for task in (*takings.values(), *others):
            task.cancel()
        await asyncio.gather(*takings.values(), *others, return_exceptions=True)
        await memo.api.close()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(event: kopf.RawEvent, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        metadata, status = body["metadata"], body.get("status") or {}
        uid = metadata["uid"]
        over = event["type"] == "DELETED" or status.get("phase") in (READY, FAILED)
        if over or uid in takings or status.get("nodeName", node) != node:
            return
        taking = Taking(memo.api, node, locks, metadata["namespace"], metadata["name"], uid)
        takings[uid] = asyncio.create_task(run(taking, uid))

    async def run(taking: Taking, uid: str) -> None:
        try:
            await taking.run()
        except Exception:
            log.exception("PodCheckpoint %s", uid)
        finally:
            del takings[uid]

    async def watch(looks: Node | Noting, seconds: float) -> None:
        while True:
            try:
                await looks.look()
            except Exception:
                log.exception("node %s", node)
            await asyncio.sleep(seconds)


def logged_in(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """As the service account of a pod, else as KUBECONFIG says."""
    info = kopf.login_with_service_account(settings=settings)
    info = info or kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise kopf.LoginError("there is neither a service account nor a KUBECONFIG")
    return info


def main() -> None:
    """Be the agent of the node NODE_NAME until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    registry = kopf.OperatorRegistry()
    register(registry, os.environ["NODE_NAME"])
    with contextlib.suppress(KeyboardInterrupt):
        kopf.run(registry=registry, clusterwide=True, standalone=True, memo=kopf.Memo())
