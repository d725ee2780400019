"""What runs the programs of ``--reward_source code``: sandboxes of this machine, SandboxFusion, or AReaL's service.

A service that fails is asked again with back-off, and then is an error; it never becomes a failed test.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from lightppo.errors import RequestError, RewardError
from lightppo.http_client import HTTPClient
from lightppo.rewards.reward_source import RewardRequest
from lightppo.verifiers.code import (
    CodeCase,
    CodeReward,
    CodeTests,
    CodeVerdict,
    CodeVerifier,
    Comparison,
    SandboxVerifier,
)
from lightppo.verifiers.sandbox import SandboxLimits, SandboxPool
from lightppo.verifiers.sandbox.supervisor import (
    PRELUDE_MODULES,
    find_function,
    make_prelude,
    plain_value,
)
from lightppo.verifiers.thinking import Thinking

Answer = TypeVar("Answer")

_MOST_BYTES = 64 << 20
_MEMORY_MB = 1024  # of a program


def code_reward(request: RewardRequest) -> CodeReward:
    """Return the source of ``--reward_source code``."""
    return CodeReward(
        verifier=_verifier(request),
        thinking=Thinking(request.tokenizer),
        **request.options_of(CodeReward),
    )


def _verifier(request: RewardRequest) -> CodeVerifier:
    verifier_options = request.config.verifier
    if verifier_options.function_call_url is not None:
        return FunctionCallVerifier(**request.options_of(FunctionCallVerifier))
    comparison = Comparison(**request.options_of(Comparison))
    if verifier_options.sandbox_fusion_url is not None:
        return SandboxFusionVerifier(
            comparison=comparison, **request.options_of(SandboxFusionVerifier)
        )
    limits = SandboxLimits(**request.options_of(SandboxLimits))
    sandbox_pool = SandboxPool(limits=limits, **request.options_of(SandboxPool))
    return SandboxVerifier(
        pool=sandbox_pool, comparison=comparison, **request.options_of(SandboxVerifier)
    )


@dataclass(eq=False, kw_only=True)
class _Service:
    """Ask a service that runs programs."""

    wait_seconds: ClassVar[float] = 30.0  # beyond a program's own limits: the queue and the network

    code_timeout: float = 6.0  # seconds of a test
    concurrency: int = 64  # requests at a time
    retries: int = 3
    sleep: Callable[[float], None] | None = None

    def _connect(self, flag: str, url: str, default_path: str, seconds: float) -> None:
        """Make the client; ``default_path`` is added to an address without one."""
        url_parts = urlsplit(url)
        if url_parts.path in ("", "/"):
            url = url_parts._replace(path=default_path).geturl()
        self._client = HTTPClient(
            url,
            flag,
            retries=self.retries,
            max_concurrent=self.concurrency,
            timeout=seconds + self.wait_seconds,
            max_bytes=_MOST_BYTES,
            sleep=self.sleep,
        )

    def _ask(self, request: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Answer:
        try:
            return self._client.post("", request, read)
        except RequestError as error:
            raise RewardError(str(error)) from None

    def close(self) -> None:
        """End waits between tries."""
        self._client.close()


def _caller(program: str, function: str, output_mark: str) -> str:
    """Return source that calls a function as the sandbox does. All that it prints is the value, behind the mark."""
    return f"""\
import collections, importlib, json, site, sys
from collections.abc import Callable
from typing import Any
PRELUDE_MODULES = {PRELUDE_MODULES}
{inspect.getsource(make_prelude)}
{inspect.getsource(find_function)}
{inspect.getsource(plain_value)}
sys.setrecursionlimit(200000)
getattr(sys, "set_int_max_str_digits", int)(0)
arguments = json.loads(sys.stdin.read())
output, sys.stdout = sys.stdout, sys.stderr
prelude = make_prelude()
names = prelude | {{"__name__": "solution"}}
exec(compile({program!r}, "<program>", "exec"), names)
value = find_function(names, {function!r}, prelude)(*arguments)
print({output_mark!r} + json.dumps(value, default=plain_value), file=output, flush=True)
"""


@dataclass(eq=False)
class SandboxFusionVerifier(_Service):
    """Let `SandboxFusion <https://github.com/bytedance/SandboxFusion>`_ run programs, one request per test."""

    sandbox_fusion_url: str  # http://host:port/run_code; a missing path is added
    comparison: Comparison = field(default_factory=Comparison)

    def __post_init__(self) -> None:
        seconds = 2 * self.code_timeout  # of compiling, and of running
        self._connect("--sandbox_fusion_url", self.sandbox_fusion_url, "/run_code", seconds)

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Run the program on all tests; raise :class:`RewardError` if the service gave no usable answer."""
        verdict = CodeVerdict()
        for test_case in tests.cases:
            self._judge(code, tests.function, test_case, verdict)
            if verdict.compile_error or (first_failure_ends and verdict.timeouts):
                break
        return verdict

    def _judge(
        self, code: str, function: str | None, test_case: CodeCase, verdict: CodeVerdict
    ) -> None:
        output_mark = f"SANDBOX_FUSION_MARK{secrets.token_hex(8)}:"
        source = code if function is None else _caller(code, function, output_mark)
        request = {
            "code": source,
            "stdin": test_case.program_input,
            "language": "python",
            "compile_timeout": self.code_timeout,
            "run_timeout": self.code_timeout,
            "memory_limit_MB": _MEMORY_MB,
            "files": {},
            "fetch_files": [],
        }
        ended_well, timed_out, verdict.compile_error, stdout = self._ask(request, _read_run)
        verdict.timeouts += timed_out
        if function is None:
            verdict.passed.append(ended_well and self.comparison.printed(stdout, test_case))
        else:
            answer = stdout.rpartition(output_mark)[2] if output_mark in stdout else ""
            verdict.passed.append(
                ended_well and self.comparison.returned(answer.strip(), test_case)
            )


_NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")


def _read_run(answer: dict[str, Any]) -> tuple[bool, bool, bool, str]:
    """Return what SandboxFusion says about a program: it ended well, timed out, is not valid, and what it printed.

    Failures of the service, not of the program, are errors here.
    """
    if answer["status"] not in ("Success", "Failed"):
        raise ValueError(f"status {answer['status']}: {answer.get('message')}")
    compilation = answer.get("compile_result")
    execution = answer.get("run_result")
    steps = [step for step in (compilation, execution) if step is not None]
    if not steps or any(step["status"] not in ("Finished", "TimeLimitExceeded") for step in steps):
        raise ValueError(f"neither finished nor timed out: {str(steps)[:200]}")
    timed_out = any(step["status"] == "TimeLimitExceeded" for step in steps)
    failed = any(step.get("return_code") != 0 for step in steps)
    if answer["status"] == "Success" and (timed_out or failed or execution is None):
        raise ValueError("status Success for a program that did not end well")
    stdout, stderr = (str((execution or {}).get(name) or "") for name in ("stdout", "stderr"))
    error = stderr.strip().rpartition("\n")[2].partition(":")[0]
    is_invalid = failed and not timed_out and (execution is None or error in _NOT_PYTHON)
    return not timed_out and not failed, timed_out, is_invalid, stdout


_AREAL = {
    "language": "PYTHON",
    "runtime": "python-default",
    "isFastFail": True,
    "isRemote": False,
    "query_index": 0,
    "memory": 0,  # the service's own limit
}


@dataclass(eq=False)
class FunctionCallVerifier(_Service):
    """Let AReaL's function-call service run programs and compare outputs."""

    function_call_url: str  # /apis/functioncalls is added if it has no path

    def __post_init__(self) -> None:
        url = self.function_call_url
        self._connect("--function_call_url", url, "/apis/functioncalls", self.code_timeout)

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Let the service judge the program on all tests; raise :class:`RewardError` if it gave no usable answer."""
        verdict = CodeVerdict()
        for number, test_case in enumerate(tests.cases):
            test_input, output = test_case.raw
            request = _AREAL | {
                "uid": f"lightppo-{secrets.token_hex(8)}-case-{number}-{number + 1}",
                "code": code,
                "entryFunction": tests.function or "",
                "testcases": [{"input": test_input.strip(), "expectedOutput": output.strip()}],
                "timeout": self.code_timeout,
            }
            passed, timed_out = self._ask(request, _read_verdict)
            verdict.passed.append(passed)
            verdict.timeouts += timed_out
            if first_failure_ends and not passed:
                break
        return verdict


def _read_verdict(answer: dict[str, Any]) -> tuple[bool, bool]:
    """Tell whether all tests of the request passed, and whether one timed out."""
    passed = answer["success"]
    results = answer.get("results") or []
    if not isinstance(passed, bool) or not all(isinstance(result, dict) for result in results):
        raise TypeError("'success' must be true or false, 'results' a list of objects")
    for result in results:
        if result.get("errorType") == "SystemError":
            raise ValueError(f"SystemError: {result.get('reason')}")
    reasons = [f"{result.get('errorType')} {result.get('reason')}".lower() for result in results]
    timed_out = not passed and any(
        "timeout" in reason or "timed out" in reason for reason in reasons
    )
    return passed, timed_out
