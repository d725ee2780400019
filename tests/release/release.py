"""Build what `pip install lightppo` gets, and try it as a stranger would: `make release`.

    python tests/release/release.py [--pythons python3.11 python3.12] [--output dist]

It stops at the first thing that is wrong. The source archive and the wheel are built twice from the last commit, in
different folders, and must be the same bytes. The wheel alone is installed beside today's releases, does the
quickstart in an empty folder in three ways, and is removed again without a trace. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).parents[2]
# What each Python does with the wheel: the quickstart's arguments. The first one does all, the others the first.
QUICKSTARTS = ((), ("--env", "lookup"), ("--ranks", "2", "--zero_stage", "2"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons", nargs="+", default=[sys.executable], help="that install the wheel"
    )
    parser.add_argument("--output", type=Path, default=REPO / "dist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-") as temporary:
        folder = Path(temporary)
        check_texts()
        archives = build_twice(folder)
        say("twine check")
        run([sys.executable, "-m", "twine", "check", "--strict", *archives])
        wheel = next(archive for archive in archives if archive.suffix == ".whl")
        for i, python in enumerate(options.pythons):
            ways = QUICKSTARTS if i == 0 else QUICKSTARTS[:1]
            try_wheel(python, wheel, folder / f"python{i}", ways)
        options.output.mkdir(exist_ok=True)
        for archive in archives:
            shutil.copy(archive, options.output)
            say(f"{options.output / archive.name}  sha256 {digest(archive)}")


def check_texts() -> None:
    """The version has its part of the changelog; what an upload still needs is said."""
    changes = output_of(["git", "status", "--porcelain"])
    if changes:
        raise SystemExit(f"release: these files are not committed:\n{changes}")
    version = re.search(r'"(.+)"', (REPO / "lightppo" / "version.py").read_text().split("=")[1])[1]
    heading = re.search(
        rf"^## {re.escape(version)}\b(.*)$", (REPO / "CHANGELOG.md").read_text(), re.M
    )
    if heading is None:
        raise SystemExit(
            f"release: CHANGELOG.md has no part '## {version}', the version of lightppo/version.py"
        )
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    say(f"lightppo {version}, {project['license']}, Python {project['requires-python']}")
    if "not released" in heading[1]:
        say(
            f"before an upload: CHANGELOG.md says that {version} is not released; put the date there"
        )
    if "urls" not in project:
        say(
            "before an upload: pyproject.toml has no [project.urls]; put the repository's address there"
        )


def build_twice(folder: Path) -> list[Path]:
    """Build from copies of the last commit at two places; return the archives, which must be the same."""
    say("building twice")
    epoch = output_of(["git", "log", "-1", "--format=%ct"])
    builds = []
    for name in ("first", "a second place"):
        source, output = folder / name / "source", folder / name / "dist"
        source.mkdir(parents=True)
        archive = folder / name / "source.tar"
        run(["git", "archive", "--output", archive, "HEAD"], cwd=REPO)
        run(["tar", "--extract", "--file", archive, "--directory", source])
        run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source],
            quiet=True,
            SOURCE_DATE_EPOCH=epoch,
        )
        (source_archive,) = output.glob("*.tar.gz")
        write_without_traces(source_archive, int(epoch))
        builds.append(sorted(output.iterdir()))
    for one, other in zip(*builds, strict=True):
        if (one.name, digest(one)) != (other.name, digest(other)):
            raise SystemExit(f"release: two builds of {one.name} differ")
    return builds[0]


def write_without_traces(path: Path, epoch: int) -> None:
    """Write a source archive again, in the order of names, without times and owners of this machine."""
    tar_bytes = io.BytesIO()
    with (
        tarfile.open(path) as built,
        tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in sorted(built.getmembers(), key=lambda member: member.name):
            content = built.extractfile(member)
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, member.size, epoch
            clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            written.addfile(clean, content)
    path.write_bytes(gzip.compress(tar_bytes.getvalue(), mtime=epoch))


def try_wheel(python: str, wheel: Path, folder: Path, ways: Sequence[Sequence[str]]) -> None:
    """Install, do the quickstart in an empty folder, uninstall: nothing may be left."""
    version = output_of([python, "--version"])
    say(f"{version}: installing {wheel.name} beside today's releases")
    environment = folder / "environment"
    run([python, "-m", "venv", environment])
    programs = environment / "bin"
    pip = [programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # torch by its exact pin first, as README says: nothing else then chooses its build.
    (torch,) = re.findall(r"^torch==.*$", (REPO / "requirements.txt").read_text(), re.M)
    run([*pip, "install", torch], quiet=True)
    run([*pip, "install", wheel], quiet=True)
    say(output_of([programs / "lightppo", "--version"], cwd=folder))
    for i, words in enumerate(ways):
        empty = folder / f"empty{i}"
        empty.mkdir()
        say(f"{version}: lightppo quickstart {' '.join(words)}")
        log = folder / f"quickstart{i}.log"
        with log.open("w") as stream:
            code = subprocess.run(
                [programs / "lightppo", "quickstart", *words],
                cwd=empty,
                stdout=stream,
                stderr=stream,
            ).returncode
        text = log.read_text()
        if code:
            raise SystemExit(f"{text[-4000:]}\nrelease: the quickstart ended with code {code}")
        summary = json.loads((empty / "runs" / "quickstart" / "summary.json").read_text())
        before, after = (summary[name]["accuracy"] for name in ("eval_before", "eval_after"))
        print(text[text.rindex("held-out prompts") :])
        if not after > max(0.9, before):
            raise SystemExit(f"release: the accuracy went from {before:.3f} to {after:.3f}")
    run([*pip, "uninstall", "--yes", "lightppo"])
    left = [path for path in environment.rglob("*") if "lightppo" in path.name.lower()]
    if left:
        raise SystemExit(f"release: left after uninstalling: {', '.join(map(str, left))}")
    say(f"{version}: uninstalled, nothing is left")


def run(
    command: Sequence[object], cwd: Path | None = None, quiet: bool = False, **variables: str
) -> None:
    """Run a command; its failure ends the release, with what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | variables,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode:
        shown = (done.stdout or "")[-4000:]
        raise SystemExit(f"{shown}\nrelease: {command[0]} ended with code {done.returncode}")


def output_of(command: Sequence[object], cwd: Path = REPO) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


if __name__ == "__main__":
    main()
