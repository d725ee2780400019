"""Verifiers that let a service run the programs: SandboxFusion, and AReaL's function-call service.

A service that fails is asked again with back-off, and then is an error; it never becomes a failed test.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lightppo.errors import RequestError, RewardError
from lightppo.http import HTTPClient
from lightppo.rewards.code import CodeCase, CodeTests, CodeVerdict, Comparison
from lightppo.sandbox.supervisor import PRELUDE_MODULES

T = TypeVar("T")

_MOST_BYTES = 64 << 20
_WAIT_SECONDS = 30.0  # beyond a program's own limits: the service's queue and the network


def _client(url: str, path: str, flag: str, **options: Any) -> HTTPClient:
    """A client for ``url``, with ``path`` added if the address has no path."""
    parts = urlsplit(url)
    url = url if parts.path not in ("", "/") else parts._replace(path=path).geturl()
    return HTTPClient(url, f"--{flag}", max_bytes=_MOST_BYTES, **options)


def _ask(client: HTTPClient, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return client.post("", request, read)
    except RequestError as error:
        raise RewardError(str(error)) from None


_MARK = "SANDBOX_FUSION_MARK"
# The program runs in a namespace of its own; what it prints goes to the error output, its value behind a mark.
_CALLER = """\
import importlib, json, sys
names = {}
for name in MODULES:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    names.update({key: getattr(module, key) for key in public})
names.update({name: sys.modules[name] for name in MODULES if name not in ("builtins", "typing")})
prelude = dict(names)
names["__name__"] = "solution"
sys.setrecursionlimit(200000)
arguments = json.loads(sys.stdin.read())
output, sys.stdout = sys.stdout, sys.stderr
exec(compile(CODE, "<program>", "exec"), names)
solution = names.get("Solution")
if isinstance(solution, type) and hasattr(solution, FUNCTION):
    function = getattr(solution(), FUNCTION)
elif FUNCTION in names and names[FUNCTION] is not prelude.get(FUNCTION):
    function = names[FUNCTION]
else:
    raise NameError(FUNCTION)
value = function(*arguments)
print("MARK" + json.dumps(value), file=output, flush=True)
"""


class SandboxFusionVerifier:
    """Lets `SandboxFusion <https://github.com/bytedance/SandboxFusion>`_ run programs, one request per test.

    Args:
        sandbox_fusion_url: ``http://host:port/run_code``; a missing path is added.
        sandbox_fusion_max_concurrent: requests at a time.
        sandbox_fusion_language: sent as ``language``; functions are called in ``python`` only.
        sandbox_fusion_retries: further tries of a failed request.
        code_timeout: seconds, sent as ``compile_timeout`` and ``run_timeout``.
    """

    def __init__(
        self,
        sandbox_fusion_url: str,
        comparison: Comparison | None = None,
        *,
        sandbox_fusion_max_concurrent: int = 64,
        sandbox_fusion_memory_limit_mb: int = 1024,
        sandbox_fusion_language: str = "python",
        sandbox_fusion_retries: int = 3,
        code_timeout: float = 6.0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._client = _client(
            sandbox_fusion_url,
            "/run_code",
            "sandbox_fusion_url",
            timeout=2 * code_timeout + _WAIT_SECONDS,
            retries=sandbox_fusion_retries,
            max_concurrent=sandbox_fusion_max_concurrent,
            sleep=sleep,
        )
        self.concurrency = sandbox_fusion_max_concurrent
        self.comparison = comparison or Comparison()
        self._memory = sandbox_fusion_memory_limit_mb
        self._language = sandbox_fusion_language
        self._timeout = code_timeout

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Runs the program on all tests; raises :class:`RewardError` if the service gave no usable answer."""
        if tests.function is not None and self._language != "python":
            raise RewardError(f"tests that call {tests.function}() need --sandbox_fusion_language python")
        verdict = CodeVerdict()
        for case in tests.cases:
            self._judge(code, tests.function, case, verdict)
            if verdict.compile_error or (first_failure_ends and not verdict.passed[-1]):
                break
        return verdict

    def close(self) -> None:
        """Ends waits between tries."""
        self._client.close()

    def _judge(self, code: str, function: str | None, case: CodeCase, verdict: CodeVerdict) -> None:
        mark = f"{_MARK}{secrets.token_hex(8)}:"
        source = code
        if function is not None:
            header = f"MODULES, CODE, FUNCTION = {PRELUDE_MODULES!r}, {code!r}, {function!r}\n"
            source = header + _CALLER.replace("MARK", mark)
        run = _ask(
            self._client,
            {
                "code": source,
                "stdin": case.given,
                "language": self._language,
                "compile_timeout": self._timeout,
                "run_timeout": self._timeout,
                "memory_limit_MB": self._memory,
                "files": {},
                "fetch_files": [],
            },
            _read_run,
        )
        verdict.timeouts += run["timeout"]
        verdict.compile_error = run["compile_error"]
        if not run["good"]:
            verdict.passed.append(False)
        elif function is None:
            verdict.passed.append(self.comparison.printed(run["stdout"], case))
        else:
            answer = run["stdout"].rpartition(mark)[2] if mark in run["stdout"] else ""
            verdict.passed.append(self.comparison.returned(answer.strip(), case))


_RUN_STATUS = ("Finished", "TimeLimitExceeded")
_NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")


def _read_run(answer: dict[str, Any]) -> dict[str, Any]:
    """What SandboxFusion says about a program; failures of the service, not of the program, are errors here."""
    if answer["status"] not in ("Success", "Failed"):
        raise ValueError(f"status {answer['status']}: {answer.get('message')}")
    compiled, ran = answer.get("compile_result"), answer.get("run_result")
    steps = [step for step in (compiled, ran) if step is not None]
    if not steps or any(step["status"] not in _RUN_STATUS for step in steps):
        raise ValueError(f"neither finished nor timed out: {str(steps)[:200]}")
    timeout = any(step["status"] == "TimeLimitExceeded" for step in steps)
    failed = any(step.get("return_code") != 0 for step in steps)
    stdout, stderr = (str((ran or {}).get(name) or "") for name in ("stdout", "stderr"))
    last = stderr.strip().rpartition("\n")[2].partition(":")[0]
    no_python = failed and not timeout and (ran is None or last in _NOT_PYTHON)
    if answer["status"] == "Success" and (timeout or failed or ran is None):
        raise ValueError("status Success for a program that did not end well")
    return {"good": not timeout and not failed, "timeout": timeout, "compile_error": no_python, "stdout": stdout}


class FunctionCallVerifier:
    """Lets AReaL's function-call service run programs and compare outputs.

    Args:
        function_call_url: the service's address; ``/apis/functioncalls`` is added if it has no path.
        function_call_batch_size: tests per request if the first failure ends (a share needs one request per test).
        function_call_memory_limit_mb: sent as ``memory``, rounded up to 256; 0: the service's own limit.
        code_timeout: seconds per test, sent as ``timeout``.
    """

    def __init__(
        self,
        function_call_url: str,
        *,
        function_call_max_concurrent: int = 64,
        function_call_batch_size: int = 1,
        function_call_memory_limit_mb: int = 1024,
        function_call_retries: int = 3,
        code_timeout: float = 6.0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        if function_call_batch_size < 1:
            raise ValueError(f"--function_call_batch_size must be at least 1, got {function_call_batch_size}")
        self._client = _client(
            function_call_url,
            "/apis/functioncalls",
            "function_call_url",
            timeout=function_call_batch_size * code_timeout + _WAIT_SECONDS,
            retries=function_call_retries,
            max_concurrent=function_call_max_concurrent,
            sleep=sleep,
        )
        self.concurrency = function_call_max_concurrent
        self._batch = function_call_batch_size
        self._memory = -(-function_call_memory_limit_mb // 256) * 256
        self._timeout = code_timeout

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Lets the service judge the program on all tests; raises :class:`RewardError` if it gave no usable answer."""
        verdict = CodeVerdict()
        size = self._batch if first_failure_ends else 1
        for start in range(0, len(tests.cases), size):
            cases = tests.cases[start : start + size]
            passed, timed_out = _ask(self._client, self._request(code, tests.function, cases, start), _read_verdict)
            verdict.passed += [passed] * len(cases)
            verdict.timeouts += timed_out
            if first_failure_ends and not passed:
                break
        return verdict

    def close(self) -> None:
        """Ends waits between tries."""
        self._client.close()

    def _request(self, code: str, function: str | None, cases: tuple[CodeCase, ...], start: int) -> dict[str, Any]:
        return {
            "uid": f"lightppo-{secrets.token_hex(8)}-case-{start}-{start + len(cases)}",
            "language": "PYTHON",
            "runtime": "python-default",
            "code": code,
            "entryFunction": function or "",
            "isFastFail": True,
            "isRemote": False,
            "testcases": [{"input": case.raw[0].strip(), "expectedOutput": case.raw[1].strip()} for case in cases],
            "timeout": self._timeout,
            "memory": self._memory,
            "query_index": 0,
        }


def _read_verdict(answer: dict[str, Any]) -> tuple[bool, bool]:
    """Whether all tests of the request passed, and whether one timed out."""
    passed, results = answer["success"], answer.get("results") or []
    if not isinstance(passed, bool) or not all(isinstance(result, dict) for result in results):
        raise TypeError("'success' must be true or false, 'results' a list of objects")
    broken = next((result for result in results if result.get("errorType") == "SystemError"), None)
    if broken is not None:
        raise ValueError(f"SystemError: {broken.get('reason')}")
    reasons = [f"{result.get('errorType')} {result.get('reason')}".lower() for result in results]
    timed_out = not passed and any("timeout" in text or "timed out" in text for text in reasons)
    return passed, timed_out
