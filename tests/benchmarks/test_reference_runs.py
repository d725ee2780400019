"""reference_runs.py: the same code gives the same numbers; another option is found, at its step and metric."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.ranks import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = "kl-loss-k3"


@pytest.fixture
def reference_runs(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_script("reference_runs")


@pytest.mark.slow
def test_record_and_compare(tmp_path):
    """One process for all three, which has the imports done."""
    path = tmp_path / "out.json"
    commands = [
        ["record", path, RUN],
        ["compare", path, RUN],
        ["compare", path, RUN, "--flags=--ref_ema_eta 0.9"],
    ]
    script = tmp_path / "three.py"
    script.write_text(
        f"import json, sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nfrom reference_runs import main\n"
        "print([main(words) for words in json.loads(sys.argv[1])])\n"
    )
    output = run_ranks(script, json.dumps(commands, default=str), world_size=1).output
    assert "[0, 0, 1]" in output.splitlines(), output
    assert f"{RUN}: equal\n" in output
    # The reference moves after the first step, and its KL counts in the loss alone.
    assert re.search(rf"{RUN}: step 2, rollout/kl: [-\d.e]+ was recorded, now [-\d.e]+ ", output)

    recorded = json.loads(path.read_text())["runs"][RUN]
    assert [row["step"] for row in recorded["rows"]] == [1, 2]
    assert not [
        name
        for row in recorded["rows"]
        for name in row
        if name == "time" or name.startswith("perf/")
    ]
    assert list(recorded["weights"]) == ["model/model.safetensors"]


def test_differences_are_exact_and_the_first_is_named(reference_runs):
    def result(loss: float, **more: float) -> dict:
        return {
            "rows": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": loss, **more}],
            "weights": {"a": "12", "b": "34"},
        }

    assert reference_runs.difference(result(0.1), result(0.1)) is None
    assert reference_runs.difference(result(float("nan")), result(float("nan"))) is None
    found = reference_runs.difference(result(0.1), result(0.1 + 2**-56, kl=0.0))
    assert "step 2, loss: 0.1 was" in found
    assert "0.10000000000000002" in found
    assert "(2 differences" in found  # the new metric too
    assert "b: SHA-256 34" in reference_runs.difference(
        result(0.1), result(0.1) | {"weights": {"a": "12", "b": "35"}}
    )
    assert "step 2: was" in reference_runs.difference(
        result(0.1), {"rows": result(0.1)["rows"][:1], "weights": {}}
    )


def test_every_recipe_has_a_run(reference_runs):
    recipes = {path.stem for path in (BENCHMARKS.parent / "examples" / "recipes").glob("*.yaml")}
    assert recipes == {
        name.removeprefix("recipe-") for name in reference_runs.RUNS if name.startswith("recipe-")
    }


def test_the_last_of_repeated_flags_wins(reference_runs):
    words = reference_runs.words_of("--a 1 2 --b --c {out}/x --a 3", {"out": "here"})
    assert words == ["--a", "3", "--b", "--c", "here/x"]


def test_an_unknown_name_is_refused(reference_runs):
    with pytest.raises(SystemExit, match="no-such-run"):
        reference_runs.chosen(["no-such-run", "quick"])
