"""Types and ranges: what is brought into the type of an option, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest

from lightppo.config import AlgorithmConfig, PPOConfig
from lightppo.config.fields import option, range_text
from lightppo.config.ppo import all_options
from lightppo.config.values import conform, in_words
from lightppo.errors import ConfigError

Stage = Literal[0, 3]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (1e6, int, 1_000_000),
        ("12", int, 12),
        ("1e6", int, 1_000_000),
        (2**63 + 1, int, 2**63 + 1),
        (str(2**63 + 1), int, 2**63 + 1),  # a float in between would lose the 1
        (1, float, 1.0),
        ("1e-6", float, 1e-6),
        (math.inf, float, math.inf),
        (True, bool, True),
        ("None", str, "None"),
        (Path("a/b"), str, "a/b"),
        (None, str | None, None),
        (None, tuple[str, ...] | None, None),
        ([], tuple[str, ...], ()),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ("a", tuple[str, ...], ("a",)),
        ([-10, 10], tuple[float, float] | None, (-10.0, 10.0)),
        (0, Stage, 0),
        (None, Stage | None, None),
    ],
)
def test_conform(value, kind, expected):
    result = conform(value, kind)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        (math.inf, int, "a whole number"),
        ("many", float, "a number"),
        (math.nan, float, "a number"),
        ("nan", float, "a number"),
        (None, float, "a number"),
        (0, bool, "true or false"),
        ("true", bool, "true or false"),
        (5, str, "text"),
        ({}, str | None, "text or None"),
        (1, Stage, "one of 0, 3"),
        (False, Stage, "one of 0, 3"),
        ("0", Stage, "one of 0, 3"),
        ([0.9], tuple[float, float], "2 numbers"),
        (0.9, tuple[float, float], "2 numbers"),
        ([1, "x"], tuple[int, ...], "a list of whole numbers"),
        (None, tuple[str, ...], "a list of texts"),
        ([["a"]], tuple[str, ...] | None, "a list of texts or None"),
    ],
)
def test_conform_refuses(value, kind, words):
    assert in_words(kind) == words
    with pytest.raises(TypeError) as error:
        conform(value, kind)
    assert str(error.value) == f"must be {words}, not {value!r}"


def test_every_default_is_of_its_type_and_in_range():
    assert PPOConfig().value_problems() == []


def test_names_are_unique_over_the_sections():
    names = [f.name for _, f in all_options()]
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
    bounds = next(f for _, f in all_options() if f.name == name).metadata["bounds"]
    for value in outside:
        with pytest.raises(ConfigError) as error:
            PPOConfig.from_flat({name: value})
        assert str(error.value).startswith(f"--{name} ")
        assert str(error.value).endswith(f" is out of range: it must be {range_text(bounds)}")


def test_range_text():
    assert range_text({"ge": 0, "lt": 0.5}) == "≥0 <0.5"
    assert range_text({}) == ""


def test_option_refuses_unknown_bounds():
    with pytest.raises(TypeError, match="unknown bounds \\['min'\\]"):
        option(1, "help", min=0)


def test_from_flat_names_every_mistake():
    with pytest.raises(ConfigError) as error:
        PPOConfig.from_flat(gama=1, bf16="yes", top_p=2, gamma=0.5)
    assert str(error.value).split("\n") == [
        "unknown option 'gama' (did you mean 'gamma'?)",
        "--bf16 must be true or false, not 'yes'",
        "--top_p 2.0 is out of range: it must be >0 ≤1",
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
        with pytest.raises(ConfigError, match="--advantage_estimator must be one of gae, reinforce, "):
            check()


def test_every_option_says_what_it_does():
    for home, f in all_options():
        assert f.metadata["help"].endswith((".", ")")), f"{home}.{f.name}"
