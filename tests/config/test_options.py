"""PPOConfig: from flags and values and back, ranges, run_config.yaml, changes on resume."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.options import other_value

from lightppo.config import AlgorithmConfig, PPOConfig, options, parse_args
from lightppo.config.options import all_options
from lightppo.errors import ConfigError

TRICKY = [
    "None",
    "null",
    "~",
    "true",
    "1e5",
    "0x1F",
    "007",
    "2024-01-01",
    " spaces around ",
    "--no_bf16",
    "-1",
    "a: b # c",
    "- x",
    "[a, b]",
    "{}",
    "'\"",
    "@*&!%`|>",
    "line\nbreak\tand tab",
    "≥ ünïcode 🙂",
    "C:\\path",
]


@pytest.fixture
def back(tmp_path, monkeypatch):
    """``back(config)``: the options that --config reads from the run_config.yaml of this config."""
    # Combinations of arbitrary values contradict each other; how they are written does not depend on that.
    monkeypatch.setattr(options, "contradictions", lambda config, world_size, by_hand, unfed: [])
    from lightppo.logging.run_folder import write_run_config

    def run(config: PPOConfig) -> dict[str, Any]:
        config = config.with_options(save_path=tmp_path / "run")
        write_run_config(config)
        path = tmp_path / "run" / "run_config.yaml"
        return parse_args(["--config", str(path)]).flat() | {
            "config": config.file.config,
            "save_path": "./ckpt",
        }

    return run


@pytest.mark.parametrize("text", TRICKY)
def test_every_option_with_another_value(back, text):
    values = {
        o.name: other_value(o, text) for o in all_options() if o.name not in ("config", "save_path")
    }
    # what these stand for would be resolved into others
    values |= {"flash_attn": False, "load_checkpoint": True}
    defaults = PPOConfig().flat()
    assert {name for name in values if values[name] == defaults[name]} == {
        "flash_attn",
        "load_checkpoint",
    }
    config = PPOConfig().with_options(**values)
    assert back(config) == config.flat()


def test_defaults_none_and_empty(back):
    none = {o.name: None for o in all_options() if o.may_be_none}
    empty = {o.name: () for o in all_options() if Ellipsis in get_args(o.type)}
    assert {"value_clip", "reward_clip_range"} < none.keys()  # where None is not the default
    assert {"stop", "reward_pretrain"} < empty.keys()
    config = PPOConfig().with_options(**none, **empty).resolved()
    assert back(config) == config.flat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_clip_range", (-1e-30, 1e300)),
        ("actor_learning_rate", 1e-6),
        ("actor_learning_rate", 5e-324),
        ("max_ckpt_mem", float("inf")),
        ("eval_correct_threshold", -0.5),
        ("top_k", -1),
        ("local_rank", -3),
        ("seed", 2**63 - 1),
    ],
)
def test_numbers(back, name, value):
    assert back(PPOConfig().with_options(**{name: value}).resolved())[name] == value


def test_save_path_that_cannot_be_written(tmp_path):
    from lightppo.logging.run_folder import write_run_config

    (tmp_path / "file").write_text("")
    config = PPOConfig.from_flat(save_path=tmp_path / "file" / "run")
    problem = f"--save_path {tmp_path}/file/run: cannot be written (Not a directory)"
    with pytest.raises(ConfigError) as error:
        write_run_config(config)
    assert str(error.value) == problem


@pytest.mark.parametrize(
    "name",
    # what decides which samples are drawn, what is learned from them, or what a checkpoint holds
    ["pretrain", "prompt_data", "rollout_batch_size", "temperature", "advantage_estimator", "train_batch_size",
     "actor_learning_rate", "bf16", "seed", "enable_ema", "init_kl_coef"],
)  # fmt: skip
def test_options_that_make_the_run_are_not_free(name):
    assert not next(o for o in all_options() if o.name == name).resume_safe


def test_every_default_is_of_its_type_and_in_range():
    assert PPOConfig.from_flat(PPOConfig().flat()) == PPOConfig()


def test_names_are_unique_over_the_sections():
    names = [o.name for o in all_options()]
    assert len(names) == len(set(names)) > 100


# Below and above each end of a range that occurs: (option, values inside, values outside).
@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("rollout_batch_size", [1], [0, -1]),  # ≥1
        ("min_new_tokens", [0], [-1]),  # ≥0
        ("top_k", [-1], [-2]),  # ≥-1
        ("gamma", [0, 1], [-0.01, 1.01]),  # ≥0 ≤1
        ("top_p", [0.01, 1], [0, 1.01]),  # >0 ≤1
        ("eps_clip", [0.01, 1], [0, 1.01]),  # >0 ≤1
        ("ema_beta", [0, 0.99], [-0.1, 1]),  # ≥0 <1
        ("kl_target", [None, 0.1], [0]),  # >0, or not checked
        ("adam_betas", [(0, 0.9)], [(0.9, 1.0), (-0.1, 0.9)]),  # each entry
        ("stop_token_ids", [(), (0, 7)], [(7, -1)]),
        ("eval_correct_threshold", [-5.0, 5.0], []),  # no range
    ],
)
def test_ranges(name, inside, outside):
    for value in inside:
        assert PPOConfig.from_flat({name: value}).flat()[name] == value
    for value in outside:
        with pytest.raises(ConfigError, match=f"^--{name} must be .*[≥>]"):
            PPOConfig.from_flat({name: value})


def test_from_flat_names_every_mistake():
    with pytest.raises(ConfigError) as error:
        PPOConfig.from_flat(gama=1, bf16="yes", top_p=2, gamma=0.5)
    assert str(error.value).split("\n") == [
        "unknown option 'gama' (did you mean 'gamma'?)",
        "--bf16 must be true or false, not 'yes'",
        "--top_p must be a number >0 ≤1, not 2",
    ]


def test_from_flat_takes_a_mapping_and_keywords():
    config = PPOConfig.from_flat({"gamma": 0.5, "lambd": 0.5}, lambd=1)
    assert (config.algorithm.gamma, config.algorithm.lambd) == (0.5, 1.0)


def test_with_options_leaves_the_original_alone():
    config = PPOConfig()
    changed = config.with_options(gamma=0.5)
    assert (config.algorithm.gamma, changed.algorithm.gamma) == (1.0, 0.5)
    assert changed.flat() == {**config.flat(), "gamma": 0.5}


def test_sections_made_by_hand_are_checked_too():
    config = PPOConfig(algorithm=AlgorithmConfig(advantage_estimator="gaee"))
    for check in (config.validate, config.resolved):
        with pytest.raises(ConfigError, match=r"--advantage_estimator: .*'gaee'.*gae, reinforce, "):
            check()


def test_every_option_says_what_it_does():
    for one in all_options():
        assert one.help.endswith((".", ")")), one.name
