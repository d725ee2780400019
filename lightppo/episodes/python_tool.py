"""The built-in tool ``python``: runs a program of the model in the sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from lightppo.episodes.env_failures import EnvFailure, Reply
from lightppo.errors import SandboxError
from lightppo.processes.user_calls import in_daemon_thread

_PROGRAM = """
def _run(source):
    import ast, builtins, sys, traceback
    names = {"__name__": "__main__", "__builtins__": builtins}
    try:
        tree = ast.parse(source, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<python>":
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)

_run(SOURCE)
"""


def python(code: str) -> str:
    """Runs a Python program and returns what it prints, and the value of its last line.

    Nothing is kept between calls.

    Args:
        code: The whole program.
    """
    raise EnvFailure("the tool python runs in the sandbox only")


class PythonRunner:
    """The sandboxes of the tool."""

    def __init__(self, make_pool: Callable[[], Any] | None = None) -> None:
        from lightppo.verifiers.sandbox import SandboxPool

        self._pool = (make_pool or SandboxPool)()

    async def call(self, arguments: Mapping[str, Any]) -> Reply:
        """Run a program. What it does wrong is text for the model; :class:`EnvFailure`: the sandbox failed.

        The sandbox has the limits. The wait for a free one counts for none.
        """
        program = _PROGRAM.replace("SOURCE", json.dumps(arguments["code"]))
        try:
            run = await asyncio.wrap_future(in_daemon_thread(self._pool.run, program))
        except SandboxError as error:
            raise EnvFailure(str(error)) from error
        limits = {
            "timeout": f"stopped: it ran longer than {self._pool.limits.code_timeout:g} s",
            "output": "stopped: it printed too much",
            "memory": "stopped: it needed too much memory",
            "processes": "stopped: it started too many processes",
            "signal": f"stopped: it died by signal {abs(run.code)}",
        }
        problem = limits.get(run.ended, "")
        if run.ended == "exit" and run.code not in (0, 1):
            problem = f"exit code {run.code}"
        printed = (run.stdout, run.stderr, problem)
        text = "\n".join(part.rstrip("\n") for part in printed if part.strip())
        failed = run.ended != "exit" or run.code != 0
        return Reply(text or "(nothing was printed)", error=failed)

    def close(self) -> None:
        """End the sandboxes."""
        self._pool.close()
