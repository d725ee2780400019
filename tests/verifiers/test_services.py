"""Clients against small servers on loopback that speak the services' protocols, also badly."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from support.http_server import ok

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.verifiers.code import CodeReward, find_tests
from lightppo.verifiers.programs import FunctionCallVerifier, SandboxFusionVerifier

ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
PAIR_CALLS = {"fn_name": "f", "inputs": ["1"], "outputs": ["[2, 1]"]}
ADD_CALLS = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}


def cases_of(table):
    return find_tests(Prompt("p", [1], extra={"input_output": table}))


@pytest.fixture
def serve(make_server):
    """``serve(reply)``: a server on loopback that answers with ``reply(path, request)``."""

    def start(reply):
        server = make_server()
        server.reply = lambda path, body, n: reply(path, body)
        return server

    return start


def fusion_answer(status="Success", run=None, **more):
    ran = {
        "status": "Finished",
        "return_code": 0,
        "stdout": "3\n",
        "stderr": "",
        "execution_time": 0.01,
    } | (run or {})
    return ok(
        **({"status": status, "message": "", "compile_result": None, "run_result": ran} | more)
    )


def run_for_real(path, request):
    """What SandboxFusion does with Python, for programs that the tests themselves wrote."""
    done = subprocess.run(
        [sys.executable, "-c", request["code"]],
        input=request["stdin"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    result = {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return fusion_answer("Success" if done.returncode == 0 else "Failed", result)


def sequence(*replies):
    """One after the other, the last one for ever."""
    left = list(replies)
    return lambda path, request: left.pop(0) if len(left) > 1 else left[0]


# --- SandboxFusion


def fusion(service, **options):
    url = service if isinstance(service, str) else service.url
    return SandboxFusionVerifier(url, sleep=lambda seconds: None, **options)


def test_fusion_request(serve):
    service = serve(lambda path, request: fusion_answer())
    verifier = fusion(service, code_timeout=4.0)
    verifier.verify("code", cases_of(ADD), first_failure_ends=False)
    first = {"code": "code", "stdin": "1 2\n", "language": "python", "compile_timeout": 4.0, "run_timeout": 4.0,
             "memory_limit_MB": 1024, "files": {}, "fetch_files": []}  # fmt: skip
    assert service.requests == [("/run_code", first), ("/run_code", first | {"stdin": "3 4\n"})]


def test_fusion_keeps_a_path(serve):
    service = serve(lambda path, request: fusion_answer())
    fusion(service.url + "/proxy/run_code?key=a-secret-key").verify(
        "c", cases_of(ADD), first_failure_ends=True
    )
    assert service.requests[0][0] == "/proxy/run_code?key=a-secret-key"


@pytest.mark.parametrize(
    ("tests", "code", "passed"),
    [
        (ADD, "print(sum(map(int, input().split())))", [True, True]),
        (ADD, "print(3)", [True, False]),
        (ADD, "print(3)\nraise SystemExit(1)", [False, False]),
        (ADD_CALLS, "def add(a, b): return a + b", [True, True]),
        (
            ADD_CALLS,
            "class Solution:\n    def add(self, a: List[int], b): return a + b",
            [True, True],
        ),
        (ADD_CALLS, "print('noise')\ndef add(a, b):\n    print(a)\n    return 3", [True, False]),
        (ADD_CALLS, "def add(a, b): return a / 0", [False, False]),
        (ADD_CALLS, "def sub(a, b): return a - b", [False, False]),
        (PAIR_CALLS, "import collections\ndef f(a): return collections.deque([2, a])", [True]),
        (PAIR_CALLS, "def f(a): return {1, 2}", [False]),
        (ADD_CALLS, "import sys\nsys.exit(0)", [False, False]),
        (ADD_CALLS, "print('SANDBOX_FUSION_MARK3')\nimport os\nos._exit(0)", [False, False]),
    ],
)
def test_fusion_verdicts(serve, tests, code, passed):
    verdict = fusion(serve(run_for_real)).verify(code, cases_of(tests), first_failure_ends=False)
    assert (verdict.passed, verdict.timeouts, verdict.compile_error) == (passed, 0, False)


@pytest.mark.parametrize("tests", [ADD, ADD_CALLS])
def test_fusion_no_python(serve, tests):
    verdict = fusion(serve(run_for_real)).verify(
        "def add(:", cases_of(tests), first_failure_ends=False
    )
    assert (verdict.passed, verdict.compile_error) == ([False], True)


def test_fusion_compile_error_without_a_run(serve):
    compiled = {"status": "Finished", "return_code": 1, "stderr": "expected ';'"}
    service = serve(
        lambda path, request: fusion_answer("Failed", compile_result=compiled, run_result=None)
    )
    verdict = fusion(service).verify("x", cases_of(ADD), first_failure_ends=False)
    assert (verdict.passed, verdict.compile_error) == ([False], True)


def test_fusion_timeout(serve):
    service = serve(
        lambda path, request: fusion_answer(
            "Failed", {"status": "TimeLimitExceeded", "return_code": None}
        )
    )
    verdict = fusion(service).verify("x", cases_of(ADD), first_failure_ends=False)
    assert (verdict.passed, verdict.timeouts) == ([False, False], 2)


LATE = ("Failed", {"status": "TimeLimitExceeded", "return_code": None})


@pytest.mark.parametrize(("answer", "asked"), [(("Success", {"stdout": "4"}), 2), (LATE, 1)])
def test_fusion_is_asked_for_every_test_until_one_is_too_late(serve, answer, asked):
    service = serve(lambda path, request: fusion_answer(*answer))
    assert (
        fusion(service).verify("x", cases_of(ADD), first_failure_ends=True).passed
        == [False] * asked
    )
    assert len(service.requests) == asked


BAD_ANSWERS = {
    "sandbox error": (
        fusion_answer("SandboxError", message="no disk"),
        "status SandboxError: no disk",
    ),
    "run error": (fusion_answer("Failed", {"status": "Error"}), "neither finished nor timed out"),
    "nothing ran": (fusion_answer("Failed", run_result=None), "neither finished nor timed out"),
    "contradiction": (fusion_answer("Success", {"return_code": 1}), "did not end well"),
    "no status": (ok(answer=42), "status"),
    "a list": ((200, b"[]"), "got list"),
    "HTML": ((200, b"<html>busy</html>"), "not JSON"),
    "deep": ((200, b"[" * 100_000), "not JSON"),
    "nothing": ((200, b""), "'status'"),
    "500": ((500, b"oops"), "HTTP 500: oops"),
    "429": ((429, b""), "HTTP 429"),
    "504": ((504, b""), "HTTP 504"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_bad_answers_are_tried_again(serve, name):
    reply, problem = BAD_ANSWERS[name]
    recovered = serve(sequence(reply, reply, fusion_answer()))
    assert (
        fusion(recovered, retries=2).verify("x", cases_of(ADD), first_failure_ends=True).passed[0]
    )
    service = serve(lambda path, request: reply)
    with pytest.raises(
        RewardError, match=rf"--sandbox_fusion_url {service.url}/run_code: .*{problem}.*3 of 3"
    ):
        fusion(service, retries=2).verify("x", cases_of(ADD), first_failure_ends=True)
    assert len(service.requests) == 3


def test_a_dead_service_is_an_error_that_names_it(serve):
    service = serve(lambda path, request: (503, b""))
    waits = []
    verifier = SandboxFusionVerifier(service.url, retries=2, sleep=waits.append)
    rollout = Rollout(
        Prompt("p", [1], extra={"input_output": ADD}), 0, [1], "```python\nprint(3)\n```", "stop"
    )
    with pytest.raises(RewardError, match=rf"{service.url}/run_code: HTTP 503.*3 of 3"):
        CodeReward(verifier).score([rollout])
    assert waits == [1, 2]


def test_a_slow_service(serve, monkeypatch):
    monkeypatch.setattr(SandboxFusionVerifier, "wait_seconds", 0.2)
    release = threading.Event()
    service = serve(lambda path, request: (release.wait(600), fusion_answer())[1])
    verifier = fusion(service, code_timeout=0.1, retries=0)
    try:
        with pytest.raises(RewardError, match="not complete after"):
            verifier.verify("x", cases_of(ADD), first_failure_ends=True)
    finally:
        release.set()
        while service.now:  # the server is used again
            time.sleep(0.01)


def test_requests_at_a_time(serve):
    """Two are under way together at some moment, never three."""
    both = threading.Barrier(2)

    def reply(path, request):
        both.wait(120)
        return fusion_answer()

    service = serve(reply)
    reward = CodeReward(fusion(service, concurrency=2), code_max_tests=1)
    prompt = Prompt("p", [1], extra={"input_output": ADD})
    rollouts = [Rollout(prompt, i, [1], "```\nx\n```", "stop") for i in range(6)]
    assert reward.score(rollouts).scores == [1.0] * 6
    assert service.most_at_once == 2


def test_some_failures_are_unscored(serve):
    """Half of the programs make the service fail: they have no score, the others have theirs."""
    service = serve(
        lambda path, request: (500, b"") if "bad" in request["code"] else fusion_answer()
    )
    prompt = Prompt("p", [1], extra={"input_output": ADD})
    rollouts = [
        Rollout(prompt, i, [1], f"```\n{word}\n```", "stop")
        for i, word in enumerate(["good", "bad"] * 2)
    ]
    output = CodeReward(fusion(service), code_max_tests=1).score(rollouts)
    assert output.scores == [1.0, None, 1.0, None]
    assert output.metrics["failures"] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "url", ["ftp://host/run", "localhost:8080", "http://", "http://me:password@host/run"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="--sandbox_fusion_url") as caught:
        fusion(url)
    assert "password@" not in str(caught.value)
    with pytest.raises(ValueError, match="--function_call_url"):
        FunctionCallVerifier(url)


# --- AReaL's function-call service


def calls(service, **options):
    return FunctionCallVerifier(service.url, sleep=lambda seconds: None, **options)


@pytest.mark.parametrize(
    ("tests", "function", "inputs"),
    [(ADD, "", ["1 2", "3 4"]), (ADD_CALLS, "add", ["1\n2", "3\n4"])],
)
def test_function_call_request(serve, tests, function, inputs):
    service = serve(lambda path, request: ok(uid=request["uid"], success=True, results=[]))
    verifier = calls(service, code_timeout=5.0)
    assert verifier.verify("code", cases_of(tests), first_failure_ends=True).passed == [True, True]
    for (path, request), given, output in zip(service.requests, inputs, ("3", "7"), strict=True):
        assert path == "/apis/functioncalls"
        assert request.pop("uid").startswith("lightppo-")
        assert request == {
            "language": "PYTHON",
            "runtime": "python-default",
            "code": "code",
            "entryFunction": function,
            "isFastFail": True,
            "isRemote": False,
            "testcases": [{"input": given, "expectedOutput": output}],
            "timeout": 5.0,
            "memory": 0,
            "query_index": 0,
        }


def test_function_call_verdicts(serve):
    """One test a request: the first passes, the second times out."""
    late = {"success": False, "errorType": "TimeoutError", "reason": "Time limit exceeded"}

    def reply(path, request):
        good = request["testcases"][0]["input"] == "1 2"
        return ok(success=good, results=[{"success": True} if good else late])

    verdict = calls(serve(reply)).verify("code", cases_of(ADD), first_failure_ends=False)
    assert (verdict.passed, verdict.timeouts) == ([True, False], 1)


def test_function_call_first_failure_ends(serve):
    service = serve(
        lambda path, request: ok(
            success=False, results=[{"success": False, "errorType": "WrongAnswer"}]
        )
    )
    verdict = calls(service).verify("code", cases_of(ADD), first_failure_ends=True)
    assert (verdict.passed, verdict.timeouts, len(service.requests)) == ([False], 0, 1)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            ok(
                success=False,
                results=[{"success": False, "errorType": "SystemError", "reason": "no pod"}],
            ),
            "no pod",
        ),
        (ok(results=[]), "success"),
        (ok(success="yes"), "'success' must be true or false"),
        (ok(success=True, results=[1]), "'results' a list of objects"),
        ((502, b""), "HTTP 502"),
    ],
)
def test_function_call_failures(serve, reply, problem):
    recovered = serve(sequence(reply, ok(success=True)))
    assert calls(recovered).verify("code", cases_of(ADD), first_failure_ends=True).passed == [
        True,
        True,
    ]
    service = serve(lambda path, request: reply)
    with pytest.raises(RewardError, match=rf"{service.url}/apis/functioncalls: .*{problem}"):
        calls(service, retries=1).verify("code", cases_of(ADD), first_failure_ends=True)
    assert len(service.requests) == 2
