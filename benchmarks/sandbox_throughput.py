"""How many small programs a second the code sandbox runs and compares.

    python benchmarks/sandbox_throughput.py [--code_processes 2] [--seconds 10]

Each kind of program is run for a while by as many threads as there are sandboxes, through the same verifier that
training uses. A stdin test is one process of its own; a row of calls is one process for all its tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

from lightppo.data.records import Prompt
from lightppo.errors import SandboxRefusedError
from lightppo.verifiers.code import CodeTests, SandboxVerifier, find_tests
from lightppo.verifiers.sandbox import ISOLATIONS, SandboxLimits, SandboxPool

ADD = "a, b = map(int, input().split())\nprint(a + b)"
PRIMES = "n = int(input())\nprint([k for k in range(2, n) if all(k % d for d in range(2, int(k**0.5) + 1))][-1])"
CALLS = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"


def rows(inputs: list[str], outputs: list[str], function: str | None = None) -> CodeTests:
    table = {"inputs": inputs, "outputs": outputs, "fn_name": function}
    return find_tests(Prompt("", [], extra={"input_output": json.dumps(table)}))


PROGRAMS = {
    "one stdin test": (ADD, rows(["1 2\n"], ["3\n"])),
    "one stdin test, primes to 2000": (PRIMES, rows(["2000\n"], ["1999\n"])),
    "ten stdin tests": (
        ADD,
        rows([f"{i} 2\n" for i in range(10)], [f"{i + 2}\n" for i in range(10)]),
    ),
    "ten calls": (
        CALLS,
        rows([f"{i}\n2" for i in range(10)], [f"{i + 2}" for i in range(10)], "add"),
    ),
}


def measure(pool: SandboxPool, code: str, tests: CodeTests, seconds: float) -> float:
    """Programs per second."""
    verifier = SandboxVerifier(pool)
    end = time.monotonic() + seconds

    def work(_: int) -> int:
        for done in itertools.count():
            if time.monotonic() > end:
                return done
            assert all(verifier.verify(code, tests, first_failure_ends=True).passed)

    started = time.monotonic()
    with ThreadPoolExecutor(pool.size) as threads:
        done = sum(threads.map(work, range(pool.size)))
    return done / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--code_processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each kind of program")
    parser.add_argument(
        "--isolation", nargs="*", default=ISOLATIONS, help="default: all that can be had"
    )
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, "
          f"Python {platform.python_version()}, {options.code_processes} processes")  # fmt: skip
    for isolation in options.isolation:
        started = time.monotonic()
        try:
            pool = SandboxPool(
                SandboxLimits(), code_processes=options.code_processes, isolations=[isolation]
            )
        except SandboxRefusedError as error:
            print(f"{isolation}: {error}")
            continue
        with pool:
            print(f"{' + '.join(pool.layers)}: started in {time.monotonic() - started:.2f} s")
            for name, (code, tests) in PROGRAMS.items():
                print(f"  {name:30} {measure(pool, code, tests, options.seconds):8.1f} programs/s")


if __name__ == "__main__":
    main()
