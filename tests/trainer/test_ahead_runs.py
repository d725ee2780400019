"""--max_staleness 1 beside what else a run may have: evaluations, corrections, tapes, adapters, reward models, refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import engines_ahead
from support.chats import CHATML, chat_tokenizer
from support.fake_vllm import TrainedVLLM, trained_servers
from support.runs import NUMBERS, fitted, forget_checkpoints, logged, trained_rows, whole_weights
from support.tiny import save_causal_lm, save_reward_model, sums, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM

from lightppo import PPOTrainer
from lightppo.__main__ import main
from lightppo.callbacks import Callback
from lightppo.config import parse_args
from lightppo.errors import ConfigError, RewardError
from lightppo.experience.rollout_check import RolloutCheck
from lightppo.plugin import ENGINES
from lightppo.rollout.vllm.servers import VLLMServerRolloutEngine
from lightppo.rollout.vllm.weights import adapter_weights, architecture, full_weights
from lightppo.table import Entry

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def servers(tiny_model):
    with trained_servers(architecture(AutoConfig.from_pretrained(tiny_model))) as servers:
        yield servers


@pytest.fixture
def ahead(make_config, servers, tmp_path):
    """``ahead(folder, **options)``: the config of a run with samples ahead."""

    def make(folder="run", **options):
        options = {
            "rollout_engine": "vllm_server",
            "vllm_server_url": [server.url for server in servers],
            "vllm_server_sync": "disk",
            "vllm_server_sync_dir": str(tmp_path),
            "vllm_server_retries": 0,
            "rollout_check": "off",
            "max_staleness": 1,
            "n_samples_per_prompt": 2,
            "num_episodes": 2,
            "save_path": str(tmp_path / folder),
            "ckpt_path": str(tmp_path / f"{folder}_ckpt"),
        } | options
        return make_config(**options)

    return make


@pytest.fixture
def at_once(monkeypatch):
    """Has each batch sampled before the step trains."""

    def waiting(method):
        def begin(self, *args, **options):
            ticket = method(self, *args, **options)
            ticket.exception(60)
            return ticket

        return begin

    def switch():
        for name in ("start", "start_turns"):
            method = getattr(VLLMServerRolloutEngine, name)
            monkeypatch.setattr(VLLMServerRolloutEngine, name, waiting(method))

    return switch


def check_same(first, second) -> None:
    assert trained_rows(first.config) == trained_rows(second.config)
    weights, others = whole_weights(first), whole_weights(second)
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


# -- evaluations -----------------------------------------------------------------------------------------------------


def evaluated(config) -> list[int]:
    return [row["step"] for row in logged(config) if "eval/reward" in row]


def test_an_evaluation_follows_each_episode(ahead, tmp_path):
    held_out = write_jsonl(tmp_path / "held_out.jsonl", sums(2))
    config = ahead(eval_data=held_out)
    run = fitted(config)
    assert evaluated(config) == [0, 3, 6]
    assert (run.state.episode, run.state.global_step) == (2, 6)


def test_an_evaluation_that_a_resumed_run_lacks_is_done_at_the_end_of_an_episode(ahead, tmp_path):
    fitted(ahead(benchmark_steps=3, save_steps=1))
    held_out = write_jsonl(tmp_path / "held_out.jsonl", sums(2))
    config = ahead(eval_data=held_out, save_steps=1)
    fitted(config)
    assert evaluated(config) == [3, 6]


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 4])
def test_no_evaluation_is_due_inside_an_episode(ahead, tmp_path, steps):
    fitted(ahead(benchmark_steps=steps, save_steps=1))
    held_out = write_jsonl(tmp_path / "held_out.jsonl", sums(2))
    config = ahead(eval_data=held_out, benchmark_steps=steps + 1, save_steps=1)
    fitted(config)
    assert steps not in evaluated(config)


# -- the correction, by hand -----------------------------------------------------------------------------------------


class Versions(Callback):
    """The actor before each step, and what the step trains on."""

    def __init__(self) -> None:
        self.models = {}
        self.experience = {}

    def on_rollouts(self, run, step, collected) -> None:
        self.models[step] = whole_weights(run)

    def on_experience(self, run, step, items) -> None:
        self.experience[step] = list(items)


@torch.no_grad()
def log_probs(folder: str, weights, experience) -> torch.Tensor:
    """(B, A)"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    logits = model(
        input_ids=experience.sequences,
        attention_mask=experience.attention_mask,
        position_ids=(experience.attention_mask.cumsum(-1) - 1).clamp(min=0),
    ).logits
    every = torch.log_softmax(logits[:, :-1], -1)
    chosen = every.gather(-1, experience.sequences[:, 1:, None])[..., 0]
    return chosen[:, -experience.num_actions :]


def test_importance_weights_by_hand(make_config, monkeypatch):
    monkeypatch.setitem(ENGINES, "atonce", Entry(f"{engines_ahead.__file__}:AtOnce"))
    config = make_config(
        rollout_engine="atonce",
        max_staleness=1,
        n_samples_per_prompt=2,
        advantage_estimator="grpo",
        init_kl_coef=0,
        actor_learning_rate=0.3,  # so that some weights are above 5
        total_training_steps=3,
    )
    versions = Versions()
    run = PPOTrainer.from_config(config, callbacks=[versions])
    assert run.config.correction.rollout_correction == "decoupled"
    assert run.config.correction.correction_high == 5
    run.fit()
    rows = trained_rows(config)
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1]
    above = 0
    for step in (2, 3):
        weights, terms = [], []
        for item in versions.experience[step]:
            # the policy that sampled, and the one that is trained
            behaviour = log_probs(config.model.pretrain, versions.models[step - 1], item)
            proximal = log_probs(config.model.pretrain, versions.models[step], item)
            is_action = item.action_mask.bool()
            torch.testing.assert_close(
                item.rollout_log_probs[is_action], behaviour[is_action], rtol=1e-4, atol=1e-4
            )
            ratio = (proximal - behaviour).exp()
            above += int((ratio > 5)[is_action].sum())
            weight = torch.where(ratio > 5, 0.0, ratio)[is_action]
            weights.append(weight)
            terms.append(-item.advantages[is_action] * weight)  # the ratio of one step is 1
        row = rows[step - 1]
        assert row["rollout/loss_weight"] == pytest.approx(
            float(torch.cat(weights).mean()), rel=1e-3
        )
        loss = float(torch.cat(terms).mean())
        assert row["train/policy_loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert above > 0


# -- with other parts of a run ---------------------------------------------------------------------------------------


def length(solution_str, ground_truth):
    """Judge a sample alone."""
    return float(len(solution_str))


OTHERS = {
    "a function of one sample": {"reward_fn": length},
    "adapters alone": {"lora_rank": 4, "vllm_lora_push": "adapter"},
    "a reward model": {"reward_fn": None},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_it_is_the_run_that_samples_before_it_trains(
    ahead, servers, at_once, tmp_path, monkeypatch, options
):
    if options.get("reward_fn", length) is None:
        options = options | {"reward_pretrain": [save_reward_model(tmp_path / "reward")]}
    for server in servers:
        monkeypatch.setattr(server, "obstacle", None)
    first = fitted(ahead("first", **options))
    at_once()
    second = fitted(ahead("second", **options))
    check_same(first, second)
    assert [row["rollout/staleness"] for row in trained_rows(first.config)] == [0, 1, 1, 1, 1, 1]
    if "lora_rank" in options:
        assert len(servers[0].adapters) >= 6


@pytest.mark.parametrize(("options", "compared"), [({}, 1), (OTHERS["adapters alone"], 2)])
def test_each_life_compares_rollouts_with_the_weights_that_sampled_them(
    ahead, servers, monkeypatch, options, compared
):
    """Whole weights and an adapter at its start, which after a resume is sampled ahead; and the next adapter."""
    for server in servers:
        monkeypatch.setattr(server, "obstacle", None)
    are_the_same = []

    def difference(self, rollouts):
        adapter = self.engine.adapter
        weights = dict(adapter_weights(self.actor) if adapter else full_weights(self.actor))
        pushed = servers[0].adapters[adapter] if adapter else servers[0].loaded[-1]
        are_the_same.append(all(torch.equal(weights[name], pushed[name]) for name in weights))
        return 0.0, 0.0, 1

    monkeypatch.setattr(RolloutCheck, "difference", difference)
    options = options | {"rollout_check": "error", "save_steps": 2}
    for steps in (2, 4):
        are_the_same.clear()
        fitted(ahead(benchmark_steps=steps, **options))
        assert are_the_same == [True] * compared


WORLD = """
import random
from lightppo import Step

class World:
    def reset(self, **row): ...

    def step(self, text):
        luck = random.SystemRandom()
        return Step(f" {luck.randrange(10, 99)} ", reward=luck.random(), done=luck.random() < 0.5)
"""
EPISODES = {
    "reward_fn": None,
    "label_key": "label",
    "reward_source": ["environment"],
    "max_turn_tokens": 4,
    "generate_max_len": 30,
}


@pytest.fixture
def episodes(ahead, tmp_path):
    """As ``ahead``, with an environment that never says the same again."""
    (tmp_path / "world.py").write_text(WORLD)
    return lambda folder="run", **options: ahead(
        folder, env=[f"{tmp_path / 'world.py'}:World"], **EPISODES | options
    )


def test_a_run_is_played_from_its_tape(episodes, tmp_path):
    first = fitted(episodes(tape="all"))
    second = fitted(episodes("played", tape_from=str(tmp_path / "run")))
    check_same(first, second)


def test_a_resumed_run_answers_from_its_tape(episodes):
    """The step after the checkpoint is done again: its episodes had been sampled ahead."""
    namespaces = (*NUMBERS, "episode/", "reward/turns")
    straight = fitted(episodes(tape="all", save_steps=1, max_ckpt_num=20))
    rows, weights = trained_rows(straight.config, namespaces), whole_weights(straight)
    assert [row["episode/turns"] for row in rows] == [row["reward/turns"] for row in rows]
    forget_checkpoints(Path(straight.config.checkpoint.ckpt_path), after=2)
    resumed = fitted(episodes(tape="all", save_steps=1, max_ckpt_num=20))
    assert trained_rows(resumed.config, namespaces) == rows
    others = whole_weights(resumed)
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.parametrize("step", [3, *[pytest.param(i, marks=pytest.mark.long) for i in (1, 4, 6)]])
def test_a_step_is_replayed(episodes, servers, monkeypatch, capsys, step):
    """The tape answers for the environment; the servers sample again."""
    run = fitted(episodes(tape="all", save_steps=2, max_ckpt_num=20))
    rows = trained_rows(run.config)
    monkeypatch.setattr("lightppo.trainer.run", lambda command, prog: command())
    capsys.readouterr()
    main(["replay", run.config.checkpoint.save_path, "--step", str(step)])  # exits if it differs
    assert f"step {step}" in capsys.readouterr().out
    assert trained_rows(run.config) == rows


TOOLS = """
def double(x: int) -> str:
    \"\"\"Double a number.

    Args:
        x: The number.
    \"\"\"
    return str(2 * x)
"""


class CallingVLLM(TrainedVLLM):
    """Calls the tool once with a number, and then says one; they depend on the weights."""

    tokenizer = chat_tokenizer(CHATML)

    def choice(self, body):
        choice = super().choice(body)
        number = choice["token_ids"][0]
        text = f"it is {number}"
        if "<tool_response>" not in self.tokenizer.decode(body["token_ids"]):
            call = {"name": "double", "arguments": {"x": number}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = self.tokenizer(f"{text}<|im_end|>").input_ids
        choice |= {"token_ids": ids, "finish_reason": "stop"}
        choice["logprobs"]["content"] = [{"token_id": i, "logprob": -0.5} for i in ids]
        return choice


def longer(prompts, completions):
    """1 for the longer answer to a prompt."""
    counts = Counter(map(str, prompts))
    assert set(counts.values()) == {2}
    texts = list(map(str, completions))
    longest = {}
    for prompt, text in zip(map(str, prompts), texts):
        longest[prompt] = max(longest.get(prompt, 0), len(text))
    return [float(len(t) == longest[p]) for p, t in zip(map(str, prompts), texts)]


def test_tools_are_called_ahead(ahead, at_once, tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    vocab_size = len(CallingVLLM.tokenizer)
    model = save_causal_lm(tmp_path / "model", vocab_size=vocab_size, max_position_embeddings=512)
    CallingVLLM.tokenizer.save_pretrained(model)
    server = CallingVLLM(architecture(AutoConfig.from_pretrained(model)))
    server.described["max_model_len"] = 512
    options = {
        "pretrain": model,
        "tools": [f"{tmp_path / 'tools.py'}:double"],
        "apply_chat_template": True,
        "prompt_max_len": 400,
        "generate_max_len": 100,
        "reward_fn": longer,
        "vllm_server_url": [server.url],
    }
    first = fitted(ahead("first", **options))
    rows = trained_rows(first.config, ("rollout/", "episode/"))
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert {row["episode/tool_calls"] for row in rows} == {1}
    assert {row["episode/tool_errors"] for row in rows} == {0}
    at_once()
    check_same(first, fitted(ahead("second", **options)))
    server.close()


class EndsInFlight(Callback):
    """Ends the run while the second step's episodes are played."""

    def on_rollouts(self, run, step, collected) -> None:
        raise SystemExit(3)


def test_a_run_that_ends_in_flight_ends_its_episodes(episodes, tmp_path):
    world = (tmp_path / "world.py").read_text()
    (tmp_path / "world.py").write_text(
        world.replace("luck = ", "time.sleep(0.2)\n        luck = ").replace(
            "import random", "import random, time"
        )
    )
    run = PPOTrainer.from_config(episodes(), callbacks=[EndsInFlight()])
    with pytest.raises(SystemExit) as ended:
        run.fit()
    assert ended.value.code == 3
    (pending,) = run.sampler.pending.tickets
    assert pending.ticket.exception(20) is not None


# -- what cannot sample ahead ----------------------------------------------------------------------------------------


SERVER = ["--rollout_engine", "vllm_server", "--vllm_server_url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["2", *SERVER], "1 is the most"),
        (["1"], "--rollout_engine hf samples with the weights that are trained"),
        (["1", "--rollout_engine", "vllm"], "--rollout_engine vllm samples in the process"),
        (["1", *SERVER, "--skip_rollout", "folder"], "--skip_rollout reads what others sampled"),
    ],
)
def test_refusals_are_one_line_before_anything_loads(assets, tmp_path, capsys, words, reason):
    files = [f"--{name}={value}" for name, value in assets.items()]
    with pytest.raises(SystemExit) as ended:
        parse_args([*files, f"--save_path={tmp_path / 'run'}", "--max_staleness", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--max_staleness {words[0]}: {reason}" in line


class OwnEngine:
    """An engine of a user's own, without start and finish."""

    def __init__(self, config, strategy, actor, tokenizer) -> None: ...

    def sync_weights(self, actor): ...

    def close(self): ...


def test_an_engine_without_start_and_finish_is_refused(make_config, monkeypatch):
    monkeypatch.setitem(ENGINES, "own", Entry(f"{__file__}:OwnEngine"))
    with pytest.raises(ConfigError, match="--max_staleness 1: OwnEngine cannot sample while"):
        PPOTrainer.from_config(make_config(rollout_engine="own", max_staleness=1))


@pytest.mark.parametrize("of_both", [(1, 0), (0, 1)])
def test_it_is_the_same_in_the_whole_run(ahead, of_both):
    """Samples that wait would be lost without it."""
    before, after = of_both
    fitted(ahead(max_staleness=before, benchmark_steps=2, save_steps=1))
    with pytest.raises(ConfigError, match="--max_staleness"):
        fitted(ahead(max_staleness=after, save_steps=1))


TIMED = """
import signal

def reward_func(queries, prompts, labels):
    signal.alarm(0)
    return [1.0] * len(queries)
"""


def test_a_reward_function_with_a_timer_is_told_that_it_runs_in_a_thread(ahead, tmp_path):
    (tmp_path / "timed.py").write_text(TIMED)
    with pytest.raises(RewardError, match=r"signal.alarm, .* --max_staleness$"):
        fitted(ahead(reward_fn=str(tmp_path / "timed.py")))
