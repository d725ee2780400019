"""docs/metrics.md is up to date, and says everything that a run logs, and nothing else."""

from __future__ import annotations

import re

import pytest
from support.ranks import REPO, run_ranks
from support.tiny import read_jsonl, sums, write_jsonl

from lightppo.algorithms import entries
from lightppo.episodes import episode_metrics as tally
from lightppo.logging import metrics_page as metric_names
from lightppo.logging import step_metrics as metrics
from lightppo.metric_names import PAIRS, SUPERVISED

REWARD = """
def reward_func(queries, prompts, labels, responses):
    scores = [len(set(response)) / 10 for response in responses]
    if any(label is None for label in labels):  # evaluation, 3 samples per prompt: one of prompt b stays unscored
        left_out = [prompt == "b" and i % 3 == 0 for i, prompt in enumerate(prompts)]
        scores = [None if out else score for score, out in zip(scores, left_out)]
    extras = {"length": [float(len(r)) for r in responses], "pred": [r[:1] for r in responses]}
    extras["accuracy"] = [float(len(r) > 2) for r in responses]
    return {"rewards": scores, "scores": scores, "extra_logs": extras}
"""


# Of policy losses and models that this run has not; tests/trainer/test_algorithms_act.py has them.
OF_PPO = entries.POLICY_LOSSES["ppo"].metrics
OF_OTHERS = {
    f"train/{name}"
    for name in {"aux_loss", "rejected_ratio", "replaced_experts", *entries.metric_names()}
    - OF_PPO.keys()
}
# Of training on data; tests/supervised/test_supervised.py has them.
OF_OTHERS |= {f"train/{name}" for name in SUPERVISED | PAIRS} | {"eval/loss", "eval/tokens"}
# Of a teacher; tests/trainer/test_runs.py has them.
OF_OTHERS |= {"rollout/teacher_kl", "rollout/teacher_log_prob", "train/distill_loss"}
OF_OTHERS |= {"train/teacher_top_mass"}
OF_OTHERS |= {"perf/time_teacher", "perf/teacher_ms_per_token"}
# Of groups; tests/experience/test_experience_maker.py has it.
OF_OTHERS |= {"rollout/equal_groups"}
# Of vLLM; tests/rollout/vllm/test_train_vllm.py has it.
OF_OTHERS |= {"perf/sync_megabytes"}
# Of episodes; tests/episodes/test_training.py has them.
OF_OTHERS |= {f"episode/{name}" for name in tally.NAMES} | {"alarm/failing_tools"}
OF_OTHERS |= {f"perf/{name}" for name in tally.clocked_names()}
# Of remax and of --profile_steps; tests/experience/test_sampling.py and tests/logging/test_step_metrics.py have them.
OF_OTHERS |= {"perf/time_greedy", "perf/time_start_profile", "perf/time_stop_profile"}
# Of --fp16; tests/trainer/test_non_finite.py has them.
OF_OTHERS |= {
    f"train/{role}_{name}" for role in ("actor", "critic") for name in ("overflow", "loss_scale")
}
OF_OTHERS |= {
    "alarm/loss_not_finite",
    "alarm/loss_rises",
    *(f"alarm/{x}underflow" for x in ("", "actor_", "critic_")),
}
# Of selection, which this run has not; tests/trainer/test_sampling_runs.py has it.
OF_A_GPU = {"perf/gpu_memory_gb", "perf/gpu_memory_reserved_gb"}
OF_SELECTION = {
    f"rollout/{name}"
    for name in (
        *(
            "not_best",
            "num_gen_batches",
            "trained_groups",
            "reused_groups",
            "stale_groups",
            "staleness",
        ),
        *(
            "surplus_groups",
            "kept_share",
            "rejected_equal",
            "rejected_low",
            "rejected_high",
            "rejected_unmeasured",
        ),
        *("left_out_prompts", "logp_diff_on_policy"),
    )
}


def known_as(name: str) -> str | None:
    """The entry of ``METRICS`` that a name in the logs belongs to."""
    if name in metrics.METRICS:
        return name
    if match := re.fullmatch(r"eval/[^/]+/(.+)", name):
        return "eval/<source>/<metric>" if known_as(f"eval/{match[1]}") else None
    patterns = {known: re.sub(r"<\w+>", ".+", known) for known in metrics.METRICS if "<" in known}
    return next((known for known, pattern in patterns.items() if re.fullmatch(pattern, name)), None)


def test_the_page_is_up_to_date():
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metric_names.metrics_page(), "run `make docs`"


def test_every_metric_has_its_row():
    ours = metric_names.metrics_page().partition("\n## Names of other trainers")[0]
    rows = [line for line in ours.split("\n") if line.startswith("`") and " | " in line]
    assert sorted(row.split("`")[1] for row in rows) == sorted(metrics.METRICS)
    assert {row.replace("\\|", "").count("|") for row in rows} == {1}


def test_short_names_belong_to_rollout_train_or_perf_never_to_eval():
    assert metrics.with_namespace(
        {"reward": 1.0, "response_length": 2.0, "policy_loss": 3.0, "time_step": 4.0}
    ) == {
        "rollout/reward": 1.0,
        "rollout/response_length": 2.0,
        "train/policy_loss": 3.0,
        "perf/time_step": 4.0,
    }
    short = [name.split("/")[1] for name in metrics.METRICS if not name.startswith("eval/")]
    assert len(set(short)) == len(short)


def test_a_name_of_the_users_own_is_of_training_or_by_lightrfts_prefix_of_the_rollout():
    assert metrics.with_namespace(
        {"mine": 1.0, "rollout_format_reward": 2.0, "rollout_tokens_per_second": 3.0}
    ) == {
        "train/mine": 1.0,
        "rollout/format_reward": 2.0,
        "perf/rollout_tokens_per_second": 3.0,
    }


# -- --metric_names ----------------------------------------------------------------------------------------------------

ROW = {
    "rollout/reward": 1.0,
    "rollout/reward_max": 2.0,
    "rollout/kl": 3.0,
    "rollout/prompt_length": 4.0,
    "rollout/prompt_clip_ratio": 5.0,
    "rollout/response_length": 6.0,
    "train/policy_loss": 7.0,
    "train/kl_coef": 8.0,
    "train/mine": 9.0,
    "perf/time_rollout": 10.0,
    "perf/time_greedy": 11.0,
    "perf/time_start_profile": 12.0,
    "perf/time_experience": 13.0,
    "reward/format": 14.0,
    "eval/math/mean@4": 15.0,
    "rollout/num_gen_batches": 16.0,
}


def test_names_of_verl():
    assert metric_names.renamed(ROW, "verl") == {
        "critic/score/mean": 1.0,
        "critic/score/max": 2.0,
        "actor/reward_kl_penalty": 3.0,
        "prompt_length/mean": 4.0,
        "prompt_length/clip_ratio": 5.0,
        "response_length/mean": 6.0,
        "actor/pg_loss": 7.0,
        "actor/reward_kl_penalty_coeff": 8.0,
        "actor/kl_coef": 8.0,
        "train/mine": 9.0,
        "timing_s/gen": 10.0,
        "timing_s/gen_max": 11.0,
        "timing_s/start_profile": 12.0,
        "timing_s/experience": 13.0,
        "reward/format": 14.0,
        "val-core/math/reward/mean@4": 15.0,
        "train/num_gen_batches": 16.0,
    }


def test_names_of_openrlhf_and_lightrft():
    replaced = {"rollout/kl", "perf/time_rollout", "perf/time_experience", "reward/format"}
    kept = {name: value for name, value in ROW.items() if name not in replaced}
    assert metric_names.renamed(ROW, "lightrft") == kept | {
        "train/kl": 3.0,
        "perf/experience_maker/generate_time": 10.0,
        "perf/experience_maker/actor_value_rm_time": 13.0,
        "rollout/format": 14.0,
    }
    assert metric_names.renamed(ROW, "openrlhf") == kept | {
        "train/reward": 1.0,
        "train/kl": 3.0,
        "train/response_length": 6.0,
        "perf/experience_maker/generate_time": 10.0,
        "perf/experience_maker/actor_value_rm_time": 13.0,
        "reward_metrics/format": 14.0,
        "rollout/format": 14.0,
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"train/loss": 1.0, "train/tokens": 2.0},
            {"train/gpt_loss", "train/loss_mean", "train/tokens"},
        ),
        ({"eval/loss": 1.0, "eval/tokens": 2.0}, {"eval/eval gpt_loss", "eval/tokens"}),
        (
            {
                "train/loss": 1.0,
                "train/accuracy": 0.5,
                "train/rejected_reward": 3.0,
                "train/pairs": 2.0,
            },
            {
                "train/loss",
                "train/loss_mean",
                "train/acc",
                "train/acc_mean",
                "train/reject_reward",
                "train/pairs",
            },
        ),
        (
            {"eval/loss": 1.0, "eval/accuracy": 0.5, "eval/pairs": 1.0},
            {"eval/eval_loss", "eval/acc_mean", "eval/pairs"},
        ),
        ({"eval/accuracy": 0.5}, {"eval/accuracy"}),  # of PPO
    ],
)
def test_names_of_openrlhfs_supervised_trainers(row, expected):
    assert metric_names.renamed(row, "openrlhf").keys() == expected
    assert metric_names.renamed(row, "lightrft").keys() == expected


def test_our_names_are_the_default():
    assert metric_names.renamed(ROW, "lightppo") == ROW


@pytest.mark.parametrize("names", metric_names.NAMES)
def test_each_row_of_the_tables_names_a_metric_that_exists_and_no_name_stands_for_two(names):
    table = metric_names.NAMES[names]
    own = {ours for ours in table if ours not in metrics.METRICS}
    assert own <= {
        "perf/time_<part>",
        *(f"eval/<source>/{x}@<n>" for x in ("mean", "std", "best", "worst", "maj")),
    }
    theirs = [name for of_one in table.values() for name in of_one]
    assert len(set(theirs)) == len(theirs)
    others = metrics.METRICS.keys() - table.keys()  # which keep their names
    assert set(theirs) & others == set()


def test_names_with_a_namespace_stay():
    assert metrics.with_namespace({"reward/accuracy": 1.0, "eval/reward": 2.0}) == {
        "reward/accuracy": 1.0,
        "eval/reward": 2.0,
    }


@pytest.mark.slow
def test_a_run_logs_what_is_documented_and_nothing_else(tiny_model, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    evaluation = [{"input": text, "data_source": text} for text in ("a", "b")]
    run_ranks(
        REPO / "examples" / "train_ppo.py",
        *(
            "--pretrain",
            tiny_model,
            "--reward_fn",
            tmp_path / "reward.py",
            "--save_path",
            tmp_path / "run",
        ),
        *(
            "--prompt_data",
            write_jsonl(tmp_path / "prompts.jsonl", sums(8)),
            "--ckpt_path",
            tmp_path / "checkpoints",
        ),
        *("--eval_data", write_jsonl(tmp_path / "eval.jsonl", evaluation)),
        *("--pretrain_data", write_jsonl(tmp_path / "text.jsonl", [{"text": "1+1=2"}] * 4)),
        *(
            "--rollout_batch_size=4",
            "--train_batch_size=2",
            "--micro_train_batch_size=1",
            "--generate_max_len=4",
        ),
        *(
            "--prompt_max_len=16",
            "--use_kl_loss",
            "--peak_tflops=1",
            "--eval_n_samples=3",
            "--num_examine=0",
        ),
        *(
            "--dual_clip=3",
            "--high_entropy_token_ratio=0.5",
            "--old_log_probs=forward",
            "--save_steps=1",
        ),
        world_size=1,
    )
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    logged = {name for row in rows for name in row} - {"step", "time"}
    assert {name for name in logged if known_as(name) is None} == set()
    others = OF_OTHERS | OF_SELECTION | OF_A_GPU
    assert {known_as(name) for name in logged} == set(metrics.METRICS) - others
