"""The few requests to the API server that kopf makes none of."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf

Object = dict[str, Any]

log = logging.getLogger(__name__)

MERGE = "application/merge-patch+json"
SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
PASSING = (408, 429)
STARTING, STARTING_SECONDS = (401, 403), 60.0
"""What a server says to all while it starts: it has not read yet who may do what."""


class ApiError(Exception):
    """The API server has refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @property
    def passing(self) -> bool:
        """The same request may be granted later: the server was busy, or had trouble."""
        return self.status >= 500 or self.status in PASSING


class Api:
    """Requests under the login that `login` gives, asked each time: tokens are replaced."""

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        self._login = login
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        """Raises ApiError. While the server cannot be reached, this waits."""
        return await self._ask("GET", path, query=query)

    async def create(self, path: str, body: Object) -> Object:
        """As `get`."""
        return await self._ask("POST", path, body)

    async def merge(self, path: str, body: Object) -> Object:
        """As `get`."""
        return await self._ask("PATCH", path, body, kind=MERGE)

    async def delete(self, path: str, body: Object) -> Object:
        """As `get`."""
        return await self._ask("DELETE", path, body)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        kind: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Object:
        pause, began = FIRST_PAUSE, time.monotonic()
        while True:
            try:
                return await self._once(method, path, body, kind, query or {})
            except ApiError as error:
                starting = error.status in STARTING
                late = time.monotonic() - began > STARTING_SECONDS
                if not error.passing and (late or not starting):
                    raise
                trouble: Exception = error
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = error
            log.warning("%s %s: %r; asked again in %s s", method, path, trouble, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _once(
        self, method: str, path: str, body: Object | None, kind: str, query: dict[str, str]
    ) -> Object:
        info = self._login()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=info.as_ssl_context()),
                timeout=aiohttp.ClientTimeout(total=SECONDS),
            )
        async with self._session.request(
            method,
            info.server.rstrip("/") + path,
            params=query,
            data=None if body is None else json.dumps(body),
            headers={**info.as_http_headers(), "Content-Type": kind},
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ApiError(answer.status, _message(text))
            found: Object = json.loads(text)
            return found


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text
