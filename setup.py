"""What pyproject.toml cannot say: the wheel has the examples inside the package, for `lightppo quickstart`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "lightppo", "examples")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("examples", target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithExamples})
