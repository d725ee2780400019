"""Built-in rewards in a whole run: routes by data source, real sandboxes, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from support.tiny import write_jsonl

from lightppo import PPOTrainer
from lightppo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")

ROUTES = {"gsm8k": {"math": 1, "format": 0.1}, "code": {"code": 1}}
TESTS = json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})
PROGRAM = "```python\nprint(int(input()) ** 2)\n```"


def test_verifiers_by_data_source(make_config, tmp_path):
    rows = [
        {
            "prompt": f"{i}+1",
            "data_source": source,
            "reward_model": {"ground_truth": label},
            "extra_info": {},
        }
        for i in range(2)
        for source, label in (("gsm8k", str(i + 1)), ("code", TESTS))
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {
        "reward_fn": None,
        "reward_routes": json.dumps(ROUTES),
        "async_rewards": True,
        "code_processes": 1,
    }
    config = make_config(prompt_data=data, input_key="prompt", total_training_steps=1, **options)
    try:
        trainer = PPOTrainer.from_config(config)
    except ConfigError as error:
        if "no sandbox for code" in str(error):
            pytest.skip(str(error))
        raise
    # The random model says nothing that makes sense; these answers do.
    answers = {"gsm8k": "<think>a</think><answer>1</answer>", "code": PROGRAM}
    generate = trainer.rollout_engine.generate

    def sensible(prompts, sampling, on_finished):
        def finish(rollouts):
            for rollout in rollouts:
                rollout.response_text = answers[rollout.prompt.data_source]
            on_finished(rollouts)

        return generate(prompts, sampling, finish)

    trainer.rollout_engine.generate = sensible
    trainer.fit()
    row = json.loads(Path(config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()[0])
    # the sums 0+1 and 1+1: one answer is right; both have the form; both programs are right
    assert row["rollout/reward"] == pytest.approx((1.1 + 0.1 + 1 + 1) / 4)
    assert (row["reward/failures"], row["reward/timeouts"]) == (0, 0)
    assert row["reward/code/pass_share"] == 1
    # None: has ended
    children = [child.as_dict(["cmdline"]) for child in psutil.Process().children(recursive=True)]
    assert not [child for child in children if "supervisor" in str(child["cmdline"])]
