"""Runs the cells of notebooks in order, in a Python without Jupyter: ``cells.py OUT NOTEBOOK…``.

OUT gets, as JSON, what the cells of the last one have left under some names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

names: dict[str, Any] = {}


def plain(value: Any) -> Any:
    """As JSON: a figure's lines by name, a table's rows."""
    if isinstance(value, go.Figure):
        return {line.name: [list(line.x), list(line.y)] for line in value.data}
    return value.to_dict("records") if isinstance(value, pd.DataFrame) else value.to_dict()


for notebook in sys.argv[2:]:
    names = {}
    for number, cell in enumerate(json.loads(Path(notebook).read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook}:{number}", "exec"), names)
kept = ("alarms", "reward", "lengths", "groups", "spread", "most", "answers")
found = {name: plain(names[name]) for name in kept}
Path(sys.argv[1]).write_text(json.dumps(found, default=float))
