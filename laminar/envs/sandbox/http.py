"""Runs code on a service elsewhere that speaks SandboxFusion's protocol."""

import asyncio
import time
from typing import Any, cast

import httpx2

from laminar.config import HttpSandboxConfig
from laminar.envs.sandbox.sandbox import Outcome, SandboxUnavailable, Status

ANSWER_GRACE_S = 10.0
"""Beyond a call's own limit, for the way there and back, and for the service's own queue."""
NUM_TRIES = 3
RETRY_S = 0.5
_RETRIED = frozenset({429, 500, 502, 503, 504})


class HttpSandbox:
    """Sandbox behind `POST <url>/run_code`. What a refused or lost call cost is not known: it is made again.

    transport: instead of the network, in tests.
    """

    def __init__(self, config: HttpSandboxConfig, *, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._free = asyncio.Semaphore(config.num_calls_max)
        self._client = httpx2.AsyncClient(
            base_url=config.url.rstrip("/"),
            transport=transport,
            limits=httpx2.Limits(max_connections=config.num_calls_max),
        )

    async def run(self, code: str, *, wall_s: float | None = None) -> Outcome:
        limit_s = min(wall_s or self._config.wall_s, self._config.wall_s)
        try:
            async with asyncio.timeout(self._config.queue_deadline_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"{self._config.num_calls_max} calls to {self._config.url} are under way, and none ended within "
                f"sandbox.queue_deadline_s={self._config.queue_deadline_s:g}"
            ) from error
        try:
            return await self._run(code, limit_s)
        finally:
            self._free.release()

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, code: str, limit_s: float) -> Outcome:
        began_s = time.monotonic()
        cause = ""
        for number in range(NUM_TRIES):
            if number:
                await asyncio.sleep(RETRY_S * 2**number)
            try:
                # httpx's own limits are on each part of an exchange; this one is on all of it.
                async with asyncio.timeout(limit_s + ANSWER_GRACE_S):
                    response = await self._client.post("/run_code", json=self._question(code, limit_s), timeout=None)
            except TimeoutError:
                cause = f"no answer within {limit_s + ANSWER_GRACE_S:g} s"
                continue
            except httpx2.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return self._outcome(response, time.monotonic() - began_s)
            cause = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code not in _RETRIED:
                break
        raise SandboxUnavailable(f"{self._config.url}/run_code: {cause}")

    def _question(self, code: str, limit_s: float) -> dict[str, Any]:
        return {
            "code": code,
            "language": "python",
            "run_timeout": limit_s,
            "compile_timeout": limit_s,
            "memory_limit_MB": self._config.memory_bytes // 2**20,
        }

    def _outcome(self, response: httpx2.Response, wall_s: float) -> Outcome:
        """Raises SandboxUnavailable for an answer that is none, or says that the service itself failed."""
        try:
            answer = cast(dict[str, Any], response.json())
            ran = cast(dict[str, Any], answer.get("run_result") or {})
            output = f"{ran.get('stdout') or ''}{ran.get('stderr') or ''}"
            status = _status(str(answer["status"]), ran)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SandboxUnavailable(f"{self._config.url} answered with something else: {error}") from error
        if status is None:
            raise SandboxUnavailable(f"{self._config.url}: {answer.get('message') or 'the sandbox failed'}")
        if len(output) > self._config.output_bytes:
            return Outcome("output", output[: self._config.output_bytes], wall_s)
        return Outcome(status, output, wall_s)


def _status(status: str, ran: dict[str, Any]) -> Status | None:
    """None: the service failed, and the code may never have run."""
    if status == "Success":
        return "ok"
    if ran.get("status") == "TimeLimitExceeded":
        return "timeout"
    return "error" if status == "Failed" else None
