"""A remote sandbox: SandboxFusion's answers, its failures, and an end to every wait."""

import asyncio
import json

import httpx2
import pytest

from laminar.config import HttpSandboxConfig
from laminar.envs.sandbox import http
from laminar.envs.sandbox.http import HttpSandbox
from laminar.envs.sandbox.sandbox import SandboxUnavailable

URL = "http://sandbox.example:8080/"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(http, "RETRY_S", 0.001)


def sandbox_that(answer, **config) -> HttpSandbox:
    settings = HttpSandboxConfig(kind="http", url=URL, **config)
    return HttpSandbox(settings, transport=httpx2.MockTransport(answer))


def fusion(verdict="Success", message="", **run_result):
    body = {"status": verdict, "message": message, "compile_result": None, "run_result": run_result or None}
    return httpx2.Response(200, json=body)


async def test_a_call_is_asked_as_sandbox_fusion_expects_it():
    asked: list[httpx2.Request] = []

    def answer(request):
        asked.append(request)
        return fusion(stdout="4\n", stderr="", return_code=0)

    sandbox = sandbox_that(answer, wall_s=7.0)
    outcome = await sandbox.run("print(4)", wall_s=3.0)
    await sandbox.close()
    assert (outcome.status, outcome.output) == ("ok", "4\n")
    assert str(asked[0].url) == "http://sandbox.example:8080/run_code"
    assert json.loads(asked[0].content) == {
        "code": "print(4)",
        "language": "python",
        "run_timeout": 3.0,
        "compile_timeout": 3.0,
        "memory_limit_MB": 512,
    }


@pytest.mark.parametrize(
    ("answer", "status", "output"),
    [
        (
            fusion("Failed", stdout="1\n", stderr="ZeroDivisionError\n", return_code=1),
            "error",
            "1\nZeroDivisionError\n",
        ),
        (fusion("Failed", stdout=None, stderr="x", return_code=1), "error", "x"),
        (fusion("Failed", stdout="begun", status="TimeLimitExceeded"), "timeout", "begun"),
        (fusion("Success", stdout="x" * 200), "output", "x" * 100),
    ],
)
async def test_what_became_of_the_code_is_told(answer, status, output):
    outcome = await sandbox_that(lambda _: answer, output_bytes=100).run("code")
    assert (outcome.status, outcome.output) == (status, output)


async def test_a_service_that_is_busy_is_asked_again():
    answers = [httpx2.Response(503), httpx2.Response(429), fusion(stdout="7")]
    outcome = await sandbox_that(lambda _: answers.pop(0)).run("code")
    assert outcome.output == "7"
    assert not answers


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (httpx2.Response(503, text="overloaded"), "status 503: overloaded"),
        (httpx2.Response(404, text="no such page"), "status 404: no such page"),
        (httpx2.Response(200, text="<html>"), "answered with something else"),
        (httpx2.Response(200, json={"stdout": "4"}), "answered with something else"),
        (fusion("SandboxError", message="no runner left"), "no runner left"),
    ],
)
async def test_a_service_that_fails_is_named(answer, cause):
    with pytest.raises(SandboxUnavailable, match=cause):
        await sandbox_that(lambda _: answer).run("code")


async def test_a_service_that_cannot_be_reached_is_named():
    def answer(request):
        raise httpx2.ConnectError("connection refused", request=request)

    with pytest.raises(SandboxUnavailable, match=r"sandbox\.example:8080//?run_code: ConnectError: connection refused"):
        await sandbox_that(answer).run("code")


async def test_a_service_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_GRACE_S", 0.05)

    async def answer(request):
        await asyncio.sleep(600)

    with pytest.raises(SandboxUnavailable, match=r"no answer within 0\.1 s"):
        await sandbox_that(answer, wall_s=0.05).run("code")


async def test_only_so_many_calls_are_under_way_and_the_wait_for_one_ends():
    under_way, most = 0, 0

    async def answer(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return fusion(stdout="x")

    sandbox = sandbox_that(answer, num_calls_max=3)
    await asyncio.gather(*(sandbox.run(str(n)) for n in range(12)))
    assert most == 3

    async def hold(request):
        await asyncio.sleep(600)

    sandbox = sandbox_that(hold, num_calls_max=1, queue_deadline_s=0.05)
    first = asyncio.create_task(sandbox.run("1"))
    await asyncio.sleep(0)
    with pytest.raises(SandboxUnavailable, match="1 calls to http"):
        await sandbox.run("2")
    first.cancel()
