"""Scripts of a folder that is no package: examples and benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Inside, a module is imported as a script in the folder would import it. Modules of these names are as before."""
    names = {path.stem for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
