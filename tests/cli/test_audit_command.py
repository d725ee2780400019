"""``lightppo audit``: what it prints, its flags and mistakes, and what it says of runs of lightppo itself."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from support.dumps import RIGHT, RIGHT_DUMPS
from support.ranks import REPO
from support.tiny import write_jsonl

from lightppo.__main__ import main


@pytest.fixture
def audit(capsys) -> Callable[..., tuple[int, str]]:
    def command(*words: Any) -> tuple[int, str]:
        capsys.readouterr()
        try:
            main(["audit", *map(str, words)])
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return command


def test_the_table_and_the_first_departure(tmp_path, audit):
    dump = torch.load(RIGHT / "verl_grpo.pt", weights_only=True)
    dump["advantages"][5, 3] *= 2
    torch.save(dump, tmp_path / "step.pt")
    code, out = audit(tmp_path / "step.pt", *RIGHT_DUMPS["verl_grpo.pt"].split())
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == (
        f"{tmp_path}/step.pt: verl, 8 samples, 35 trained tokens, 2 prompts of 4 samples"
    )
    assert lines[1].startswith(
        "formula: --advantage_estimator grpo --group_std_norm --grpo_std_eps 1e-06 "
    )
    assert "--no_adv_norm" in lines[1]
    assert "advantages                     35          1" in out
    expected = dump["advantages"][5, 4].item()
    assert (
        f"first that departs, advantages: row 5, column advantages, token 3: {2 * expected:.6g}, by the "
        f"formula {expected:.6g}, off by {abs(expected):.3g}"
    ) in out
    assert "not in the dump: lengths of rows, kl, " in out
    assert "not known without --logged: clip ratio, " in out


def test_json(audit):
    code, out = audit(RIGHT / "prime_rl.jsonl", "--json")
    content = json.loads(out)
    assert (code, content["form"], content["samples"]) == (0, "prime-rl", 8)
    findings = {each["quantity"]: each for each in content["findings"]}
    assert findings["ratio"]["compared"] == 35
    assert findings["advantages"]["missing"] == "needs scores"


def test_json_has_no_nan(tmp_path, audit):
    dump = torch.load(RIGHT / "verl_grpo.pt", weights_only=True)
    dump["advantages"] = dump["advantages"].clone()  # verl's returns are the same tensor
    dump["advantages"][5, 3] = torch.nan
    torch.save(dump, tmp_path / "step.pt")
    code, out = audit(tmp_path / "step.pt", *RIGHT_DUMPS["verl_grpo.pt"].split(), "--json")
    findings = {
        each["quantity"]: each for each in json.loads(out, parse_constant=pytest.fail)["findings"]
    }
    assert code == 1
    first = {"column": "advantages", "row": "row 5", "position": 3, "found": None, "expected": 0.0}
    assert findings["finite numbers"]["first"] == first


def test_a_number_of_the_log(audit):
    """The mean of the loss in the dump is known to as many digits as were logged."""
    path, flags = RIGHT / "verl_gae.pt", RIGHT_DUMPS["verl_gae.pt"].split()
    loss = torch.load(path, weights_only=True)["policy_loss"].item()
    assert audit(path, *flags, "--logged", f"policy_loss={loss:.3f}")[0] == 0
    code, out = audit(path, *flags, "--logged", f"policy_loss={loss + 0.002:.3f}")
    assert code == 1
    assert "first that departs, policy loss: column logged policy_loss: " in out


def test_the_example_of_the_page(audit, monkeypatch):
    monkeypatch.chdir(REPO)
    page = (REPO / "docs" / "experiments.md").read_text()
    transcript = page.partition("```\n$ lightppo audit ")[2].partition("\n```")[0]
    command, _, output = transcript.partition("\n")
    assert audit(*command.split()) == (1, output + "\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DUMP is required, before all flags: lightppo audit DUMP --advantage_estimator grpo"),
        (["--gamma", "1", "x.pt"], "unexpected argument 'x.pt'"),
        (["x.pt", "--advantage_estimator", "grop"], "--advantage_estimator: unknown name 'grop' (did you mean 'grpo'?)"),
        (["x.pt", "--gama", "1"], "unknown flag --gama (did you mean '--gamma'?)"),
        (["x.pt", "--gamma", "2"], "--gamma must be"),
        (["x.pt", "--form", "areal"], "--form must be"),
        (["x.pt", "--logged", "loss=1"], "--logged loss=1: write NAME=NUMBER, with a name of policy_loss, "),
        (["x.pt", "--logged", "reward=high"], "--logged reward=high: write NAME=NUMBER"),
    ],
)  # fmt: skip
def test_mistakes(words, message, audit):
    code, out = audit(*words)
    assert code == 2
    assert message in out


# -- runs of lightppo ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 4])
def test_samples_that_a_run_recorded(step, recorded, audit):
    """The run's own options are the formula; all of its samples are recorded, so that whitening can be judged."""
    code, out = audit(recorded / "one" / "rollouts" / f"step{step}.jsonl.gz")
    assert code == 0
    assert "formula: --advantage_estimator gae " in out
    assert "all agrees: finite numbers, mask, lengths of rows, advantages\n" in out


def test_scores_of_a_run(recorded, audit):
    code, out = audit(recorded / "one" / "rollouts" / "step1.jsonl")
    assert code == 0
    assert "lightppo, 8 samples, 4 prompts of 2 samples" in out


def test_the_formula_of_a_run_is_written_as_flags(recorded, copied, audit):
    run = copied("one")
    options = yaml.safe_load((run / "run_config.resolved.yaml").read_text())
    changed = options | {"reward_clip_range": [-3.0, 5.0]}
    (run / "run_config.resolved.yaml").write_text(yaml.safe_dump(changed))
    _, out = audit(run / "rollouts" / "step1.jsonl.gz")
    assert " --reward_clip_range -3 5 " in " ".join(out.split())
    assert "n_samples_per_prompt" not in out  # its samples name their prompts


def test_some_samples_of_a_step(tmp_path, recorded, audit):
    """Outside the run's folder nothing says that these are all samples; the mean over some of them is another."""
    path = shutil.copy(
        recorded / "one" / "rollouts" / "step1.jsonl.gz", tmp_path / "step1.jsonl.gz"
    )
    _, out = audit(path)
    assert "not judged: advantages: needs all samples of the step: --whole_step" in out
    assert audit(path, "--whole_step")[0] == 0
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert audit(write_jsonl(tmp_path / "some.jsonl", rows[:4]), "--whole_step")[0] == 1


def test_a_run_with_more_than_the_formula_says(recorded, copied, audit):
    run = copied("one")
    options = yaml.safe_load((run / "run_config.resolved.yaml").read_text())
    changed = options | {"bootstrap_truncated": True}
    (run / "run_config.resolved.yaml").write_text(yaml.safe_dump(changed))
    code, out = audit(run / "rollouts" / "step1.jsonl.gz")
    assert code == 0
    assert (
        "not judged: advantages: the run had --bootstrap_truncated, which no check follows" in out
    )
