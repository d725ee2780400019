"""examples/recipes/runs: each says what it needs, resolves, and passes --dry_run with tiny models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.ranks import REPO
from support.tiny import save_causal_lm, save_reward_model, save_tokenizer, write_jsonl
from support.towers import save_with_tower

from lightppo.config import PPOConfig, parse_args
from lightppo.preflight.advice import advice

FOLDER = REPO / "examples" / "recipes"
RUNS = {path.stem: path for path in sorted(FOLDER.glob("runs/*.yaml")) if path.stem != "gsm8k"}
# Also where they are the defaults: what it is, and its sizes.
ALWAYS_SAID = {"advantage_estimator", "rollout_batch_size", "train_batch_size", "init_kl_coef"}
ALWAYS_SAID |= {"prompt_max_len", "generate_max_len"}
IN_SUITE = ("distill", "gpt_oss", "qwen35")


def head_of(run: Path) -> str:
    return "\n".join(
        line for line in run.read_text(encoding="utf-8").split("\n") if line.startswith("#")
    )


def table() -> dict[str, list[str]]:
    """Run → the other cells of its row."""
    rows = re.findall(
        r"^\[(\w+)\]\(runs/\1\.yaml\) \| (.*)$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    return {name: cells.split(" | ") for name, cells in rows}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Path:
    return RUNS[request.param]


def test_each_is_in_the_table():
    assert sorted(table()) == sorted(RUNS)


def test_each_is_short_and_says_what_to_know(run):
    lines, head = run.read_text(encoding="utf-8").split("\n"), head_of(run)
    assert len(lines) <= 40
    assert lines[: head.count("\n") + 1] == head.split("\n")
    assert re.findall(r"^# (\w[\w ]+): +\S", head, re.MULTILINE)[-4:] == [
        "Start",
        "Memory",
        "Expect",
        "Not run",
    ]


def test_it_resolves_and_says_nothing_in_vain(run, monkeypatch):
    """By its own command, for as many ranks as the table says."""
    name, gpus = run.stem, int(table()[run.stem][1])
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    (command,) = re.findall(r"^# Start: +(.*)", head_of(run), re.MULTILINE)
    words = shlex.split(command)
    assert str(FOLDER.relative_to(REPO) / "runs" / f"{name}.yaml") in words
    monkeypatch.chdir(REPO)
    config = parse_args([*words[words.index("ppo") + 1 :], "--save_path", "runs/x"]).resolved()
    assert advice(config) == []
    own = {
        n: v for n, v in yaml.safe_load(run.read_text()).items() if n not in ("config", "save_path")
    }
    assert (
        config.flat().items()
        >= {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}.items()
    )
    base = yaml.safe_load(run.read_text()).get("config")
    below = (
        parse_args(["--config", str(run.parent / base)])
        if base and name != "long_answers"
        else PPOConfig()
    )
    assert [n for n in own if below.flat()[n] == config.flat()[n] and n not in ALWAYS_SAID] == []


# -- a dry run of each -------------------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ROW = {"question": "1 + 1", "answer": "so #### 2", "label": "2"}
ROWS = {
    "reward_model": {"messages": [{"role": "user", "content": "1 + 1"}]},
    "code": {"prompt": "print 2", "input_output": json.dumps({"inputs": [""], "outputs": ["2"]})},
    "long_answers": {"prompt": "1 + 1", "label": "2"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models in place of those of the runs, whose tokenizer has a chat template."""
    root, sizes = tmp_path_factory.mktemp("tiny"), {"hidden_size": 64, "intermediate_size": 128}
    found = {}
    for name, seed in (("pretrain", 0), ("teacher_pretrain", 1)):
        found[name] = save_causal_lm(root / name, seed, max_position_embeddings=512, **sizes)
    found["reward_pretrain"] = save_reward_model(root / "reward_pretrain")
    found["qwen35"] = save_with_tower("qwen3_5", root / "qwen35", max_position_embeddings=512)
    found["gpt_oss"] = save_gpt_oss(root / "gpt_oss")
    for folder in found.values():
        (Path(folder) / "chat_template.jinja").write_text(CHAT)
    return found


def save_gpt_oss(folder: Path) -> str:
    """Four experts, attention with sinks, a window in every other layer."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    tokenizer = save_tokenizer(folder)
    config = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_scaling=None,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GptOssForCausalLM(config).save_pretrained(folder)
    return str(folder)


def small(config: PPOConfig, name: str, models: dict[str, str], folder: Path) -> PPOConfig:
    """The run with tiny models and rows, sampled by the actor; all else as it is."""
    given = config.flat()
    rows = write_jsonl(folder / "rows.jsonl", [ROWS.get(name, ROW)] * 8)
    changes = {one: models[one] for one in models if given.get(one)}
    changes["pretrain"] = models.get(name, models["pretrain"])
    changes |= {one: rows for one in ("prompt_data", "eval_data") if given[one]}
    changes |= {
        "rollout_engine": "hf",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.4,
        "zpg": 1,
    }
    changes |= {
        "prompt_max_len": 128,
        "generate_max_len": 8,
        "save_path": str(folder / "run"),
        "dry_run": True,
    }
    if given["overlong_buffer_len"]:
        changes["overlong_buffer_len"] = 4
    return config.with_options(**changes)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "name", [n if n in IN_SUITE else pytest.param(n, marks=pytest.mark.long) for n in RUNS]
)
def test_dry_run(name, tiny, tmp_path, capsys, monkeypatch):
    from lightppo import PPOTrainer

    with monkeypatch.context() as launcher:
        launcher.setenv("WORLD_SIZE", table()[name][1])
        whole = parse_args(["--config", str(RUNS[name])])
    config = small(whole, name, tiny, tmp_path)
    PPOTrainer.from_config(config).fit()
    assert "dry run: one step of 2 prompts" in capsys.readouterr().out
