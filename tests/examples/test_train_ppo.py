"""PPO on two ranks, by the script, and by the command under the launchers: a crash, a resume; many options."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from support.ranks import REPO, RanksResult, run_ranks
from support.runs import forget_checkpoints
from support.tiny import read_jsonl, save_reward_model, sums, write_jsonl

SCRIPT = REPO / "examples" / "train_ppo.py"

# Scores the share of digits; on rank 1 it dies without a word in the batch that DIE_AT names, or ends `deepspeed`
# (which leaves its launch.py) in the one that STOP_AT names.
REWARD = """
import gc, os, signal, sys, psutil

calls = 0
# A run that needs none of them would take a second longer for each: what DeepSpeed's autotuner logs to; what compiles
# its Muon optimizer; what asks a C compiler which of its ops can be built.
UNUSED = {"mlflow", "torch._inductor.compile_fx", "distutils.ccompiler"}

def reward_func(queries, prompts, labels):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    if "STOP_AT" in os.environ:  # under a real launcher, whose ranks import for themselves
        assert not UNUSED & sys.modules.keys()
        assert gc.isenabled() and gc.get_freeze_count() > 100_000  # imports are no garbage to look through
    if os.environ.get("RANK") == "1" and calls == int(os.environ.get("STOP_AT", 0)):
        psutil.Process().parents()[1].terminate()
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers]
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, str]:
    root = tmp_path_factory.mktemp("train_ppo")
    (root / "reward.py").write_text(REWARD)
    return {
        "model": tiny_model,
        "reward": str(root / "reward.py"),
        "reward_model": save_reward_model(root / "rm", mean=0.5, std=2.0),
        "prompts": write_jsonl(root / "prompts.jsonl", sums(20)),
        "few_prompts": write_jsonl(root / "few_prompts.jsonl", sums(12)),
        "held_out": write_jsonl(root / "held_out.jsonl", sums(5)),
        "text": write_jsonl(
            root / "text.jsonl", [{"input": f"{i}+{i}={2 * i}"} for i in range(10)]
        ),
    }


def flags(out: Path, **options: object) -> list[str]:
    options = {"save_path": out / "model", "ckpt_path": out / "ckpt", **options}
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}={value}"]
    return words


def steps(out: Path) -> dict[int, dict[str, float]]:
    """Metrics of each training step, without what depends on the clock."""
    rows = read_jsonl(out / "model" / "metrics.jsonl")
    return {
        row["step"]: {k: v for k, v in row.items() if not k.startswith("perf/") and k != "time"}
        for row in rows
        if "rollout/reward" in row
    }


def launch(assets: dict[str, str], out: Path, *script, **options) -> RanksResult:
    arguments = flags(
        out,
        pretrain=assets["model"],
        prompt_data=assets["few_prompts"],
        eval_data=assets["held_out"],
        pretrain_data=assets["text"],
        reward_fn=assets["reward"],
        zero_stage=2,
        rollout_batch_size=4,
        train_batch_size=4,
        micro_train_batch_size=1,
        prompt_max_len=16,
        generate_max_len=6,
        num_episodes=2,
        actor_learning_rate=1e-3,
        critic_learning_rate=1e-3,
        kl_target=0.1,
        enable_ema=True,
        save_steps=2,
        total_training_steps=5,  # 12 prompts in batches of 4: the second episode begins at step 4
    )
    return run_ranks(*(script or (SCRIPT,)), *arguments, **options)


@pytest.fixture(scope="module")
def whole(assets, tmp_path_factory) -> Path:
    """A run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    launch(assets, folder)
    return folder


@pytest.mark.slow
@pytest.mark.long  # a shorter one is in tests/faults, and ranks that save before they end are below
@pytest.mark.parametrize("launcher", ["fork", "deepspeed"])
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(assets, whole, tmp_path, launcher):
    # Call 1 scores the evaluation before training, call k + 1 the rollouts of step k (call 5: the evaluation after 3).
    command = (SCRIPT,) if launcher == "fork" else ("lightppo", "ppo")
    killed = launch(assets, tmp_path, *command, launcher=launcher, check=False, env={"DIE_AT": "6"})
    assert killed.returncode != 0
    assert max(steps(tmp_path)) == 3
    assert (tmp_path / "ckpt" / "latest").read_text() == "global_step2"

    resumed = launch(assets, tmp_path)
    assert "resumed from" in resumed.output
    assert "2 steps done" in resumed.output
    assert list(steps(tmp_path)) == [1, 2, 3, 4, 5]
    assert steps(tmp_path) == steps(whole)  # every number of every step, to the last bit

    again = launch(assets, tmp_path)
    assert "complete" in again.output
    assert steps(tmp_path) == steps(whole)


@pytest.mark.slow
def test_ranks_whose_launcher_ends_save_and_go_on_as_if_nothing_had_happened(
    assets, whole, tmp_path
):
    stopped = launch(
        assets, tmp_path, "lightppo", "ppo", launcher="deepspeed", check=False, env={"STOP_AT": "4"}
    )
    assert stopped.returncode == -signal.SIGTERM
    assert (
        "which started this, has ended: stopping when the step under way is done" in stopped.output
    )
    said = f"stopped by SIGTERM after step 3 of 5; saved in {tmp_path / 'ckpt'}: the same command goes on"
    assert said in stopped.output  # which ends with the last process: nobody is left
    assert "Traceback" not in stopped.output
    assert (
        "leaked" not in stopped.output
    )  # by extension modules, where imports stay frozen to the end
    assert list(steps(tmp_path)) == [1, 2, 3]

    assert "3 steps done" in launch(assets, tmp_path).output
    assert steps(tmp_path) == steps(whole)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (tmp_path, whole)]
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.long)])
def test_bf16_zero3_reward_model_packed_grpo(assets, tmp_path, launcher):
    arguments = flags(
        tmp_path,
        pretrain=assets["model"],
        prompt_data=assets["prompts"],
        reward_pretrain=assets["reward_model"],
        normalize_reward=True,
        ref_zero_stage=0,
        zero_stage=3,
        bf16=True,
        gradient_checkpointing=True,
        packing_samples=True,
        advantage_estimator="grpo",
        n_samples_per_prompt=3,
        shuffle="groups",
        use_kl_loss=True,
        kl_estimator="k3",
        loss_agg_mode="seq-mean-token-mean",
        max_epochs=2,
        rollout_batch_size=6,
        train_batch_size=6,
        micro_train_batch_size=2,
        prompt_max_len=16,
        generate_max_len=8,
        actor_learning_rate=1e-3,
        use_tensorboard=tmp_path / "tb",
        benchmark_steps=2,
    )
    command = (SCRIPT,) if launcher == "fork" else ("lightppo", "ppo")
    run_ranks(*command, *arguments, launcher=launcher)
    rows = steps(tmp_path)
    assert [rows[step]["rollout/samples"] for step in (1, 2)] == [18, 18]
    for row in rows.values():
        assert row["train/optimizer_steps"] == 6  # 18 samples in steps of 6, twice
        assert math.isfinite(row["train/policy_loss"])
        assert row["train/actor_skipped"] == 0
        assert "train/critic_loss" not in row
    # bf16: the packed forward against the decode loop
    assert rows[1]["rollout/logp_diff_mean"] < 0.05
    assert any((tmp_path / "tb").rglob("events.out.tfevents*"))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("1+1=", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] >= 5


@pytest.mark.slow
# tests/trainer/test_resume.py goes on with a moving reference and running statistics, test_sampling_ranks.py at ZeRO-3
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_zero3_moving_reference_full_kl_and_corrections(assets, tmp_path, resumes):
    """ZeRO-3 with what gathers over ranks: running statistics, batch-normalised weights, selected tokens, the KL over
    the whole vocabulary in a packed loss, a reference that moves; ReMax's greedy answers. The last step once more, from
    the checkpoint before it."""

    def launch() -> dict[int, dict[str, float]]:
        arguments = flags(
            tmp_path,
            pretrain=assets["model"],
            prompt_data=assets["prompts"],
            reward_fn=assets["reward"],
            zero_stage=3,
            packing_samples=True,
            advantage_estimator="remax",
            policy_loss="kl_cov",
            kl_cov_ratio=0.1,
            use_kl_loss=True,
            kl_estimator="full",
            ref_ema_eta=0.5,
            entropy_coef=0.01,
            high_entropy_token_ratio=0.5,
            rollout_correction="icepop",
            correction_batch_norm=True,
            correction_veto=1e-4,
            reward_running_norm=True,
            overlong_buffer_len=3,
            early_stop_kl=5.0,
            rollout_batch_size=4,
            train_batch_size=4,
            max_epochs=2,
            micro_train_batch_size=1,
            prompt_max_len=16,
            generate_max_len=6,
            actor_learning_rate=1e-3,
            save_steps=1,
            benchmark_steps=2,
        )
        run_ranks(SCRIPT, *arguments)
        return steps(tmp_path)

    whole = launch()
    if resumes:
        forget_checkpoints(tmp_path / "ckpt", after=1)
        assert launch() == whole
    assert whole[1]["rollout/policy_kl"] == pytest.approx(0, abs=1e-5)
    assert whole[1]["train/kl_loss"] != whole[2]["train/kl_loss"] != 0
    for row in whole.values():
        assert row["train/selected_ratio"] > 0
        assert row["rollout/loss_weight_zero"] >= 0.4
        assert row["train/actor_stopped"] == 0
        assert row["reward/greedy_baseline"] >= 0
