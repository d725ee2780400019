"""The version, and the releases of other packages that it was tested with; every room may read them."""

import re
from importlib import metadata

__version__ = "0.1.0"

TESTED = {
    "torch": ("2.6", "2.15.0"),
    "transformers": ("5.6.1", "5.24.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "datasets": ("4.7", "5.2.0"),
    "peft": ("0.18", "0.21.2"),
}
"""Package → the lowest and the newest release with which tests have passed (docs/troubleshooting.md)."""


def too_old(*packages: str) -> list[str]:
    """Return a line for each of the packages that is installed in a release which cannot work; import nothing."""
    return [
        f"{package} {installed} is too old, {lowest} to {newest} work: pip install '{package}>={lowest}'"
        for package, installed, lowest, newest in _installed()
        if package in packages and _release(installed) < _release(lowest)
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


def _installed() -> list[tuple[str, str, str, str]]:
    found = []
    for package, (lowest, newest) in TESTED.items():
        try:
            found.append((package, metadata.version(package), lowest, newest))
        except (
            metadata.PackageNotFoundError
        ):  # peft need not be there, and a torch of one's own may have no name
            continue
    return found


def _release(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version, without what stands behind them, as in ``2.6.0a0+cu126``."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))
