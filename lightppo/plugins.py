"""A name that docs/extending.md had at another place: it works there for one release, with a warning."""

import sys
import types
import warnings

from lightppo.files import Files as KeptFiles

warnings.warn(
    "lightppo.plugins.ops.kept.KeptFiles is lightppo.files.Files: import it from there",
    FutureWarning,
    stacklevel=2,
)
__path__: list[str] = []  # as of a package
for _name in ("ops", "ops.kept"):
    sys.modules[f"{__name__}.{_name}"] = types.ModuleType(f"{__name__}.{_name}")
sys.modules[f"{__name__}.ops.kept"].KeptFiles = KeptFiles
