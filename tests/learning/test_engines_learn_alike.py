"""vLLM learns what Hugging Face's generation learns: one task, one model, two engines, by the script that users run."""

from __future__ import annotations

import pytest
from support.addition import STEPS, ends, short_run, steps_of, warm_start
from support.ranks import REPO, run_ranks

EPISODES = 2

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.learning]


def test_both_engines_reach_the_same_accuracy(tmp_path):
    warm_start(tmp_path, head_dim=32)  # the narrowest heads that vLLM takes on a CPU
    first, last = {}, {}
    for engine in ("hf", "vllm"):
        options = short_run(tmp_path, tmp_path / engine) | {
            "rollout_engine": engine,
            "advantage_estimator": "grpo",
            "num_episodes": EPISODES,
            "total_training_steps": EPISODES * STEPS,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        run_ranks(REPO / "examples" / "train_ppo.py", *flags, world_size=1, vllm=True)
        first[engine], last[engine] = ends(steps_of(tmp_path / engine))
    # Measured on three seeds: 0.49 to 0.53 in the first quarter, 0.85 to 0.88 in the last, engines at most 0.03 apart.
    assert last["vllm"] == pytest.approx(last["hf"], abs=0.08), (first, last)
    assert min(last[engine] - first[engine] for engine in last) > 0.2, (first, last)
