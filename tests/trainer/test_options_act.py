"""Options of algorithm, training, evaluation, checkpoints and logging: what a trainer then does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine
from support.loops import FakeCheckpointer, IdleLoop
from support.runs import fitted, logged
from support.sampled import PROMPTS, collected, sample
from support.tiny import sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.errors import RewardError
from lightppo.rewards.reward_source import score_rollouts
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.trainer import build
from lightppo.trainer.due_times import TimedSaves
from lightppo.trainer.evaluation import Evaluator

pytestmark = pytest.mark.usefixtures("world")

# -- advantages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(trainer_with) -> torch.Tensor:
    """Advantages of GAE as they are."""
    return collected(trainer_with(adv_norm=False), "advantages")


def test_whitening_of_advantages(trainer_with, raw):
    whitened = collected(trainer_with(), "advantages")  # gae whitens
    assert torch.allclose(whitened, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)
    centred = collected(trainer_with(adv_norm_by=("mean=batch",)), "advantages")
    assert torch.allclose(centred, raw - raw.mean(), atol=1e-5)
    # the targets of the critic are not whitened
    returns = [collected(trainer_with(adv_norm=on), "returns") for on in (True, False)]
    assert torch.equal(*returns)


def test_whitening_on_top_of_group_normalisation(trainer_with):
    grpo = {"advantage_estimator": "grpo", "init_kl_coef": 0.0}
    plain = collected(trainer_with(**grpo, grpo_std_eps=1.0), "advantages")
    whitened = collected(trainer_with(**grpo, grpo_std_eps=1.0, adv_norm=True), "advantages")
    assert plain.std(correction=0) < 0.7
    assert whitened.std(correction=0) == pytest.approx(1, abs=1e-5)


def test_clipping_of_advantages(trainer_with, raw):
    clipped = collected(trainer_with(adv_norm=False, advantage_clip=1.5), "advantages")
    assert torch.equal(clipped, raw.clamp(-1.5, 1.5))
    assert not torch.equal(clipped, raw)
    # after whitening
    assert collected(trainer_with(advantage_clip=0.5), "advantages").abs().max() == 0.5


def test_epsilon_of_group_normalisation(trainer_with):
    # The groups are {0, 1} and {3, 7}: mean 0.5 and std √½, mean 5 and std √8.
    for eps in (1e-6, 1.0):
        options = {"advantage_estimator": "grpo", "init_kl_coef": 0.0, "grpo_std_eps": eps}
        seen = collected(trainer_with(**options), "advantages")[:, 0]
        a, b = 0.5 / (0.5**0.5 + eps), 2 / (8**0.5 + eps)
        assert seen == pytest.approx(torch.tensor([-a, a, -b, b]), abs=1e-5)


def test_discounts_clipping_of_scores_and_kl(trainer_with):
    plain = {"adv_norm": False, "init_kl_coef": 0.0, "reward_clip_range": None}
    values = collected(trainer_with(**plain), "values")
    scores = torch.tensor([0.0, 1, 3, 7])
    # γ = ½, λ = 1: what is due at the first token is half the score
    returns = collected(trainer_with(**plain, gamma=0.5, lambd=1.0), "returns")
    assert torch.allclose(returns, torch.stack([0.5 * scores, scores], 1), atol=1e-5)
    # λ = 0: one step, V of the next token
    returns = collected(trainer_with(**plain, lambd=0.0), "returns")
    assert torch.allclose(returns, torch.stack([values[:, 1], scores], 1), atol=1e-5)
    clipped = plain | {"reward_clip_range": (0.5, 2)}
    returns = collected(trainer_with(**clipped, lambd=1.0), "returns")
    assert torch.allclose(returns[:, 1], torch.tensor([0.5, 1, 2, 2]), atol=1e-5)


# -- batches and the buffer ------------------------------------------------------------------------------------------


def test_optimizer_steps_per_rollout(trainer_with):
    def steps(**options: Any) -> float:
        trainer = trainer_with(**options)
        sample(trainer, PROMPTS, step=1)
        return trainer.ppo_train(1)["optimizer_steps"]

    assert steps(train_batch_size=4) == 1
    assert steps(train_batch_size=2) == 2
    assert steps(ppo_n_minibatches=4) == 4
    assert steps(ppo_n_minibatches=2, max_epochs=3) == 6


def prompts_of_steps(trainer: PPOTrainer, monkeypatch) -> list[list[int]]:
    """The first token of each sample, step by step, over 8 epochs of two steps."""
    steps: list[list[int]] = []

    def note(minibatch: Any, global_steps: int = 0) -> list[dict[str, float]]:
        steps.append(
            sorted(i for part in minibatch.micro_batches for i in part.sequences[:, 0].tolist())
        )
        return []

    monkeypatch.setattr(trainer, "train_minibatch", note)
    sample(trainer, [Prompt("a", [5], index=0), Prompt("b", [7], index=1)], step=1)
    trainer.ppo_train(1)
    return steps


def test_shuffle_draws_samples_or_groups(trainer_with, monkeypatch):
    """Two prompts with two samples each, two samples per step."""
    options = {"train_batch_size": 2, "max_epochs": 8}
    groups = prompts_of_steps(trainer_with(**options, shuffle="groups"), monkeypatch)
    assert len(groups) == 16
    assert all(step in ([5, 5], [7, 7]) for step in groups)
    assert {step[0] for step in groups[::2]} == {5, 7}  # either comes first
    assert [5, 7] in prompts_of_steps(trainer_with(**options, shuffle="samples"), monkeypatch)


def test_samples_kept_in_the_buffer(trainer_with):
    for limit, expected in ((0, 8), (4, 4), (6, 6)):
        trainer = trainer_with(buffer_limit=limit)
        for step in (1, 2):  # a loop of the user's own, which does not clear it
            sample(trainer, PROMPTS, step)
        assert len(trainer.replay_buffer) == expected
    assert trainer_with().replay_buffer.cpu_offload
    assert not trainer_with(buffer_cpu_offload=False).replay_buffer.cpu_offload


def test_actor_waits_for_the_critic(trainer_with):
    trainer = trainer_with(freezing_actor_steps=2)
    sample(trainer, PROMPTS, step=1)
    assert ["policy_loss" in trainer.ppo_train(step) for step in (1, 2, 3)] == [False, False, True]


def show(trainer: PPOTrainer, prompts: Any = None, step: int = 1) -> None:
    """Sample, and tell the callbacks as ``fit`` does."""
    collected = sample(trainer, prompts, step)
    trainer.callbacks.on_rollouts(trainer, step, collected)
    trainer.callbacks.on_experience(trainer, step, trainer.replay_buffer.items)


def test_samples_are_shown(trainer_with, capsys):
    for shown in (0, 1, 3):
        show(trainer_with(num_examine=shown), step=7)
        expected = [("a", "0.0", 0), ("a", "0.1", 1), ("b", "1.0", 3)][:shown]
        samples = [
            f"[step 7] prompt: {p}\n  answer: answer {a}\n  score {score}\n"
            for p, a, score in expected
        ]
        assert capsys.readouterr().out == "".join(samples)


def test_samples_of_each_data_source_are_shown(trainer_with, capsys):
    prompts = [
        Prompt("a", [5], index=0, data_source="x"),
        Prompt("b", [7], index=1, data_source="y"),
    ]
    show(trainer_with(num_examine=1), prompts)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "prompt" in line] == [
        "[step 1] prompt: a",
        "[step 1] prompt: b",
    ]


# -- when: evaluation, checkpoints, exports --------------------------------------------------------------------------


class Calls(FakeCheckpointer):
    """Stands in for checkpointer and evaluator: the steps at which each was called."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[int] = []

    def save(self, root: str, step: int, client_state: Any) -> None:
        self.saved.append(step)

    def evaluate(self, step: int) -> dict[str, float]:
        self.evaluated.append(step)
        return {"eval/accuracy": 0.0, "eval/reward": 0.0}


@pytest.mark.parametrize(
    ("options", "saved", "exported", "evaluated"),
    [
        # six steps of 10 s, two in an episode
        ({}, [], [], [2, 4, 6]),
        ({"save_steps": 4, "eval_steps": 0}, [4], [], []),
        ({"save_epochs": 2, "eval_steps": 5}, [4], [], [5]),
        ({"save_seconds": 25.0, "eval_steps": 0}, [3, 6], [], []),
        ({"save_steps": 4, "save_seconds": 25.0, "eval_steps": 0}, [3, 4], [], []),
        ({"hf_save_steps": 3, "eval_steps": 0}, [], [3, 6], []),
    ],
    ids=str,
)
def test_what_is_due_after_a_step(parts, tmp_path, options, saved, exported, evaluated):
    calls, now = Calls(), [0.0]
    folders = {"save_path": str(tmp_path / "run"), "ckpt_path": "CKPT"}
    config = PPOConfig.from_flat(**folders, **options)
    loop = IdleLoop(config, checkpointer=calls, evaluator=calls, per_episode=2)
    for callback in loop.callbacks:
        if isinstance(callback, TimedSaves):
            callback.due_times.clock, callback.due_times.last = lambda: now[0], 0.0
    for _ in range(6):
        now[0] += 10
        loop.step()
    assert (calls.saved, calls.evaluated) == (saved, evaluated)
    assert [step for _, step in calls.exported] == exported


def test_value_huber_delta_reaches_the_critic_loss(trainer_with):
    assert trainer_with(value_huber_delta=0.5).critic_loss_fn.huber_delta == 0.5


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_dropout_of_override_config_acts_in_training_alone(make_config, tmp_path):
    """The first rollout is the same and the gradient another one; a second run has the same masks."""

    def first_step(name: str, rate: float) -> dict[str, Any]:
        folder = str(tmp_path / name)
        override = json.dumps({"attention_dropout": rate})
        config = make_config(
            override_config=override, save_path=folder, benchmark_steps=1, init_kl_coef=0.1
        )
        fitted(config)
        return next(row for row in logged(config) if "train/actor_grad_norm" in row)

    plain, dropping, again = (
        first_step("plain", 0.0),
        first_step("dropping", 0.3),
        first_step("again", 0.3),
    )
    for of_rollout in ("rollout/reward", "rollout/response_length"):
        assert dropping[of_rollout] == plain[of_rollout]
    assert dropping["train/actor_grad_norm"] != plain["train/actor_grad_norm"]
    assert dropping["train/actor_grad_norm"] == again["train/actor_grad_norm"]


def test_runs_end_early_and_the_schedule_knows_or_does_not(make_config, tmp_path):
    def rates(**options: Any) -> list[float]:
        folder = str(tmp_path / str(options))
        config = make_config(**options, save_path=folder, lr_scheduler="linear", lr_warmup_steps=0)
        fitted(config)
        return [row["train/actor_lr"] for row in logged(config)]

    # 12 prompts in rollouts of 4, one optimizer step each, rate 0.01 falling to 0
    assert rates() == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    assert rates(benchmark_steps=2) == pytest.approx([0.01, 0.02 / 3])
    assert rates(total_training_steps=2) == pytest.approx([0.01, 0.005])
    assert rates(num_episodes=2, benchmark_steps=4) == pytest.approx(
        [0.01, 0.05 / 6, 0.04 / 6, 0.03 / 6]
    )


def test_a_run_that_goes_on_with_more_episodes_follows_the_longer_schedule(make_config):
    def rates(**options: Any) -> list[float]:
        config = make_config(lr_scheduler="linear", lr_warmup_steps=0, save_steps=3, **options)
        fitted(config)
        return [row["train/actor_lr"] for row in logged(config)]

    assert rates(num_episodes=1)[-1] == pytest.approx(0.01 / 3)
    # the fourth step of six, not the end of the schedule of three
    assert rates(num_episodes=2)[3:] == pytest.approx([0.03 / 6, 0.02 / 6, 0.01 / 6])


@pytest.fixture
def eval_data(tmp_path) -> str:
    return write_jsonl(tmp_path / "eval.jsonl", sums(6))


def test_evaluation_options(make_config, eval_data, parts, trainer_with):
    real_engine = HFRolloutEngine(parts["actor"][0], parts["tokenizer"])

    def evaluator(**options: Any) -> Evaluator:
        config = make_config(eval_data=eval_data, **options).resolved()
        tokenizer, strategy = parts["tokenizer"], parts["strategy"]
        source = build.build_reward(config, [], tokenizer, strategy)
        prompts = build.build_held_out(config, tokenizer, strategy)
        return build.build_evaluator(config, real_engine, source, prompts, strategy)

    def evaluated(**options: Any) -> dict[str, float]:
        return evaluator(**options).evaluate(0)

    one = evaluated()
    assert {"eval/mean@1", "eval/accuracy"} <= one.keys()
    assert not any(name.startswith("eval/pass@") for name in one)
    several = evaluated(eval_n_samples=4)
    assert {
        "eval/mean@4",
        "eval/best@4",
        "eval/pass@1",
        "eval/pass@2",
        "eval/pass@4",
    } <= several.keys()
    assert several["eval/samples"] == 24
    assert evaluated(eval_max_samples=2)["eval/samples"] == 2

    # the score is the number of ones and twos: all samples reach 0, none 100
    assert evaluated(eval_correct_threshold=0)["eval/accuracy"] == 1
    assert evaluated(eval_correct_threshold=100)["eval/accuracy"] == 0

    def responses(**options: Any) -> list[str]:
        mine = evaluator(**options)
        mine.evaluate(0)
        return [sample.response for sample in mine.samples]

    greedy = responses()
    assert greedy == responses(seed=1)
    sampled = {"eval_temperature": 1.0}
    assert greedy != responses(**sampled) != responses(**sampled, seed=1)
    assert greedy == responses(**sampled, eval_top_p=1e-6)  # only the likeliest token is left
    # training's is not taken
    assert greedy == responses(**sampled, eval_top_k=1) != responses(**sampled, top_k=1)


LENGTHS = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": -1.0, "acc": len(solution_str) > 0, "pred": solution_str[:1]}
"""


def test_an_evaluation_may_have_a_reward_of_its_own(make_config, eval_data, tmp_path):
    (tmp_path / "judge.py").write_text(LENGTHS)
    config = make_config(
        eval_data=eval_data, eval_reward_fn=f"{tmp_path / 'judge.py'}:score", eval_n_samples=2
    )
    trainer = fitted(config)
    assert trainer.evaluator.reward_source is not trainer.reward_source
    trained = [row["rollout/reward"] for row in logged(config) if "rollout/reward" in row]
    assert min(trained) >= 0  # what training scores by
    evaluated = [row for row in logged(config) if "eval/reward" in row]
    assert [row["eval/reward"] for row in evaluated] == [-1.0, -1.0]
    assert all(row["eval/accuracy"] > 0.9 and "eval/maj@2" in row for row in evaluated)
    line = (Path(config.checkpoint.save_path) / "eval" / "step3.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["extras"].keys() == {"acc", "pred"}
    format_judge = make_config(
        eval_data=eval_data, eval_reward_source=("format",), val_only=True
    ).resolved()
    building = build.Building(format_judge, format_judge, format_judge, trainer.strategy)
    build.build_rewards(building)
    assert building.judge.name == "format"
    assert building.reward_source is building.judge


def test_evaluation_before_during_and_after(make_config, eval_data, tmp_path):
    def steps(**options: Any) -> list[int]:
        config = make_config(eval_data=eval_data, save_path=str(tmp_path / str(options)), **options)
        fitted(config)
        return [row["step"] for row in logged(config) if "eval/accuracy" in row]

    assert steps() == [0, 3]
    assert steps(eval_steps=2) == [0, 2, 3]
    assert steps(val_before_train=False) == [3]


def test_evaluation_only(make_config, eval_data):
    config = make_config(eval_data=eval_data, val_only=True, save_steps=1, prompt_data=None)
    config.validate()
    trainer = fitted(config)
    assert trainer.state.global_step == 0
    assert (trainer.critic, trainer.initial_model) == (None, None)
    (row,) = logged(config)
    assert row["step"] == 0
    assert "eval/accuracy" in row
    assert not list(Path(config.checkpoint.save_path).glob("*.safetensors"))
    assert not Path(config.checkpoint.ckpt_path).exists()


def test_what_is_saved_at_the_end(make_config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def weights(path: str) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(path).lm_head.weight

    trainer = fitted(
        make_config(benchmark_steps=1, lr_warmup_steps=0, save_value_network=True, enable_ema=True)
    )
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run_critic")
    assert torch.equal(
        critic.score.weight, trainer.strategy.unwrap_model(trainer.critic).model.score.weight
    )
    ema, actor = (
        trainer.strategy.unwrap_model(model).lm_head.weight
        for model in (trainer.ema_model, trainer.actor)
    )
    assert torch.equal(weights(tmp_path / "run"), ema)
    assert not torch.equal(actor, ema)

    other = make_config(benchmark_steps=1, save_path=str(tmp_path / "other"))
    trainer = fitted(other)
    assert torch.equal(
        weights(tmp_path / "other"), trainer.strategy.unwrap_model(trainer.actor).lm_head.weight
    )
    assert not (tmp_path / "other_critic").exists()


def test_what_checkpoints_hold(make_config, tmp_path):
    def files(**options: Any) -> set[str]:
        folder = tmp_path / str(options)
        fitted(
            make_config(
                benchmark_steps=2,
                save_path=str(folder / "run"),
                ckpt_path=str(folder / "ckpt"),
                **options,
            )
        )
        return {
            str(path.relative_to(folder / "ckpt"))
            for path in (folder / "ckpt").glob("*/global_step*")
        } | {path.name for path in (folder / "ckpt").glob("global_step*")}

    whole = {f"{part}/global_step{step}" for part in ("_actor", "_critic") for step in (1, 2)}
    assert files(save_steps=1) == whole
    for limit in ({"max_ckpt_num": 1}, {"max_ckpt_mem": 1e-6}):
        # the critic's older part stays until the actor's new one is written, and goes with the next save
        assert files(save_steps=1, **limit) == whole - {"_actor/global_step1"}
    assert files(save_steps=1, save_hf_ckpt=True, enable_ema=True) == {
        *whole, "_ema/global_step1", "_ema/global_step2", "global_step1_hf", "global_step2_hf"
    }  # fmt: skip
    assert files(save_steps=1, save_hf_ckpt=True, disable_ds_ckpt=True) == {
        "global_step1_hf",
        "global_step2_hf",
    }
    assert files(hf_save_steps=2) == {"global_step2_hf"}
    assert files() == set()


def test_what_goes_to_weights_and_biases(make_config, monkeypatch):
    started, logged = [], []

    def init(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(id="run-7", define_metric=lambda *a, **k: None, finish=lambda: None,
                               log=lambda metrics, **k: logged.append(metrics))  # fmt: skip

    logged_in = {
        "setup": lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")),
        "login": lambda **_: True,
    }
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, **logged_in))
    trainer = fitted(make_config(use_wandb=True, wandb_org="an org", wandb_group="a group", wandb_project="a project",
                                 wandb_run_name="a name", benchmark_steps=1, gamma=0.5))  # fmt: skip
    (options,) = started
    assert [options[name] for name in ("entity", "group", "project", "name")] == [
        "an org", "a group", "a project", "a name"
    ]  # fmt: skip
    assert options["config"]["gamma"] == 0.5
    assert logged[0]["global_step"] == 1
    assert trainer.states["trackers"].state_dict() == {"wandb": "run-7"}


# -- reward servers --------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers 503 ``failures`` times, then 0.5 for every sample; keeps the headers of all requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.server.headers.append(dict(self.headers))
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            good = len(self.server.headers) > self.server.failures
            body = json.dumps({"rewards": [0.5] * len(asked["query"])}).encode()
            self.send_response(200 if good else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.headers, server.failures = [], 0
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_reward_servers_get_token_retries_and_timeout(make_config, server, parts, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "open-sesame")
    monkeypatch.setattr("tenacity.wait_exponential", lambda max: lambda retry_state: 0.0)
    url = f"http://127.0.0.1:{server.server_port}/score"

    def source(**options: Any) -> Any:
        options |= {"reward_fn": None, "remote_rm_url": url, "tape": "off"}
        config = make_config(**options).resolved()
        return build.build_reward(config, [], parts["tokenizer"], parts["strategy"])

    rollouts = FakeEngine().generate(PROMPTS, build.eval_sampling_params(make_config().resolved()))
    assert score_rollouts(source(remote_rm_token_env="A_TOKEN"), rollouts).scores == [0.5, 0.5]
    assert server.headers.pop()["Authorization"] == "Bearer open-sesame"
    assert score_rollouts(source(), rollouts).scores == [0.5, 0.5]
    assert "Authorization" not in server.headers.pop()

    server.failures = 2
    with pytest.raises(RewardError, match=rf"{url}: HTTP 503.*\(2 of 2 tries\)"):
        score_rollouts(source(remote_rm_retries=1), rollouts)
    server.headers.clear()
    assert score_rollouts(source(remote_rm_retries=2), rollouts).scores == [0.5, 0.5]
    assert len(server.headers) == 3
    assert source(remote_rm_timeout=7.5).timeout == 7.5


# -- micro batches, call by call -------------------------------------------------------------------------------------


def rows_of_calls(trainer: PPOTrainer) -> dict[str, list[int]]:
    """How many samples went through each model at once, in one step of 4 samples."""
    seen: dict[str, list[int]] = {}
    scoring = True
    hooks = []
    models = {"actor": trainer.actor, "reference": trainer.initial_model, "critic": trainer.critic}
    for name, model in models.items():

        def note(module: Any, args: Any, output: Any, name: str = name) -> None:
            rows = seen.setdefault(name if scoring else f"{name}_train", [])
            rows.append(args[0].shape[0])

        hooks.append(model.hf_model.get_input_embeddings().register_forward_hook(note))
    sample(trainer, PROMPTS, step=1)
    scoring = False
    trainer.ppo_train(1)
    for hook in hooks:
        hook.remove()
    return seen


def test_micro_batch_specs_and_token_budgets_are_kept(trainer_with):
    forward = {
        "old_log_probs": "forward",
        "micro_rollout_batch_size": 4,
        "micro_train_batch_size": 4,
    }
    calls = {"actor", "reference", "critic", "actor_train", "critic_train"}
    assert rows_of_calls(trainer_with(**forward)) == {call: [4] for call in calls}
    own = ["actor=1", "reference=3", "critic_train=2"]
    found = rows_of_calls(trainer_with(**forward, micro_batch_specs=own))
    assert found["actor"] == [1] * 4
    assert found["reference"] == [3, 1]
    assert (found["critic"], found["actor_train"], found["critic_train"]) == ([4], [4], [2, 2])
    # a budget that no sample fits in: each is alone; and one that holds all of them
    assert set(
        map(len, rows_of_calls(trainer_with(**forward, max_tokens_per_micro_batch=1)).values())
    ) == {4}
    assert set(
        map(len, rows_of_calls(trainer_with(**forward, max_tokens_per_micro_batch=4096)).values())
    ) == {1}


# -- dry runs --------------------------------------------------------------------------------------------------------


def test_a_dry_run_trains_once_and_leaves_nothing(make_config, tmp_path, capsys):
    config = make_config(
        dry_run=True, save_steps=1, hf_save_steps=1, eval_data=make_config().data.prompt_data
    )
    before = sorted(tmp_path.rglob("*"))
    trainer = fitted(config)
    assert trainer.state.global_step == 1
    assert sorted(tmp_path.rglob("*")) == before
    out = capsys.readouterr().out
    assert "dry run: one step of 2 prompts × 1 samples, ≤ 5 tokens, took" in out
    assert "nothing is kept" in out
    held, peak = map(float, re.search(r"resident (\S+) GiB, peak (\S+) GiB", out).groups())
    assert peak >= held > 0
    assert "later steps need up to " in out  # of Adam
    assert "[step 1] " in out  # a sample with its reward
    assert "evaluation: " in out
    assert not [
        path
        for path in Path(trainer.config.checkpoint.save_path).rglob("*")
        if "step" in path.name and path.is_dir()
    ]
