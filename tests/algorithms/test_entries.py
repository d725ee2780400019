"""The tables of algorithms: names, functions by their path, options and metrics that follow from an entry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightppo.algorithms import entries
from lightppo.algorithms.advantages import advantage_fn
from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    TABLES,
    Table,
)
from lightppo.errors import ConfigError
from lightppo.table import load

ENTRIES = [(table, name) for table in TABLES for name in table]


@pytest.mark.parametrize(
    ("table", "name"), ENTRIES, ids=lambda x: x if isinstance(x, str) else x.flag
)
def test_every_entry_has_a_function(table, name):
    entry = table.find(name)
    assert callable(entry.fn)
    for other in ("as_loss", "selection"):
        assert getattr(entry, other, None) is None or callable(load(getattr(entry, other)))
    assert entry.completed({}, name) == entry.defaults
    assert all(option.help.endswith(".") for option in entry.options)


def test_what_belongs_to_an_estimator_or_a_loss_exists():
    for entry in ADVANTAGE_ESTIMATORS.values():
        assert entry.policy_loss in POLICY_LOSSES
    modes = {
        entry.loss_agg_mode for entry in (*ADVANTAGE_ESTIMATORS.values(), *POLICY_LOSSES.values())
    }
    assert modes - {None} <= LOSS_AGG_MODES.keys()


def test_unknown_names_are_refused_with_the_nearest():
    table = Table("--flag", {"gae": 1, "rloo": 2})
    assert table.find("rloo") == 2
    with pytest.raises(ConfigError, match=r"--flag: .*'rlo' \(did you mean 'rloo'\?\).*gae, rloo"):
        table.find("rlo")
    with pytest.raises(
        ConfigError, match=r"--advantage_estimator: .*'gea' \(did you mean 'gae'\?\)"
    ):
        ADVANTAGE_ESTIMATORS.find("gea")
    with pytest.raises(ConfigError, match=r"--kl_estimator: unknown name 'mine.py:k9'"):
        entries.KL_ESTIMATORS.find("mine.py:k9")  # not from a file


def test_the_last_entry_of_a_table_counts():
    table = Table("answer", {name: entries.KL_ESTIMATORS[name] for name in ("k1", "k2")})
    table.register("k4", entries.KL_ESTIMATORS["k3"])
    assert table.last is entries.KL_ESTIMATORS["k3"].fn


# -- entries of the user's own ---------------------------------------------------------------------------------------

OWN = """
import torch

from lightppo import estimator, policy_loss

open("{marker}", "w").close()


@estimator(per_sample=True, min_group_size=2, whiten=True)
def spread(groups, **_):
    return groups.advantage * 2


def plain(*, token_rewards, action_mask, **_):
    return token_rewards * action_mask, token_rewards.clone()


@policy_loss(eps_clip=None, loss_agg_mode="seq-mean-token-sum")
def linear(x):
    return -x.log_ratio * x.advantages, x.metrics(x.beyond_limit(x.log_ratio))
"""
MISSPELT = """
@estimator(needs_critics=True)
def misspelt(**_): ...
"""


@pytest.fixture
def own(tmp_path):
    """``own("name")``: path.py:name of a file that says so when it is run."""
    (tmp_path / "own.py").write_text(OWN.replace("{marker}", str(tmp_path / "was_run")))
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def test_the_command_line_reads_files_and_does_not_run_them(own, tmp_path):
    from lightppo.config import PPOConfig

    config = PPOConfig.from_flat(
        pretrain="m",
        prompt_data="d",
        reward_fn="r.py",
        advantage_estimator=own("spread"),
        policy_loss=own("linear"),
    )
    with pytest.raises(
        ConfigError, match=r"--advantage_estimator .*own\.py:spread .*--n_samples_per_prompt"
    ):
        config.validate()
    resolved = config.with_options(n_samples_per_prompt=2).resolved()
    resolved.validate()
    assert resolved.algorithm.adv_norm is True  # whiten
    assert (resolved.loss.eps_clip_low, resolved.loss.loss_agg_mode) == (None, "seq-mean-token-sum")
    assert not ADVANTAGE_ESTIMATORS.find(own("plain")).needs_critic
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("name", "word"),
    [("sprad", "did you mean 'spread'"), ("misspelt", "needs_critics"), ("", "no function ''")],
)
def test_functions_that_are_not_there_or_say_something_wrong(own, tmp_path, name, word):
    (tmp_path / "own.py").write_text(OWN + MISSPELT)
    with pytest.raises(ConfigError, match=rf"--advantage_estimator .*{word}"):
        ADVANTAGE_ESTIMATORS.find(own(name))


def test_files_that_are_not_there_or_no_python(tmp_path):
    with pytest.raises(ConfigError, match=r"--policy_loss .*nowhere\.py:f"):
        POLICY_LOSSES.find(f"{tmp_path}/nowhere.py:f")
    (tmp_path / "bad.py").write_text("def f(:")
    with pytest.raises(ConfigError, match=r"--policy_loss .*is not Python"):
        POLICY_LOSSES.find(f"{tmp_path}/bad.py:f")


def test_functions_of_files_run(own):
    import torch
    from support.whole_step import PolicyLoss

    mask = torch.ones(4, 2, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 5.0]])
    arguments = {"token_rewards": rewards, "action_mask": mask, "scores": rewards.sum(1)}
    groups = torch.tensor([0, 0, 1, 1])
    advantages, _ = advantage_fn(ADVANTAGE_ESTIMATORS.find(own("spread")))(
        **arguments, group_ids=groups
    )
    # twice the distance from the group's mean
    assert advantages[:, 0].tolist() == [-2.0, 2.0, 0.0, 0.0]

    log_probs = torch.zeros(4, 2, requires_grad=True)
    loss, metrics = PolicyLoss(policy_loss=own("linear"))(log_probs, log_probs, advantages, mask)
    loss.backward()
    assert torch.equal(log_probs.grad, -advantages / 8)  # token-mean over 8 tokens
    assert metrics["clip_ratio"] == 0


def test_a_decorated_class_is_an_entry_too():
    from lightppo import estimator

    @estimator(min_group_size=3)
    class Own:
        def __init__(self, **_): ...

    assert ADVANTAGE_ESTIMATORS.find(Own).min_group_size == 3


def test_functions_stand_where_their_path_may(own):
    from support.whole_step import PolicyLoss

    from lightppo.user_code import load_python_function

    spread, linear = (load_python_function(own(name), name) for name in ("spread", "linear"))
    found = ADVANTAGE_ESTIMATORS.find(spread)
    assert replace(found, function="") == replace(
        ADVANTAGE_ESTIMATORS.find(own("spread")), function=""
    )
    assert found.min_group_size == 2
    assert found.function is spread
    assert PolicyLoss(policy_loss=linear).entry.loss_agg_mode == "seq-mean-token-sum"
    with pytest.raises(
        ValueError, match=r"policy_loss '<linear of lightppo_file_own_.*>' clips nothing"
    ):
        PolicyLoss(policy_loss=linear, clip_eps_low=0.2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"advantage_estimator": 3},
            "--advantage_estimator must be one of gae.*, or in Python the function or object",
        ),
        (
            {"policy_loss": object()},
            "--policy_loss: <object.*> is no name; known: ppo.*path.py:name, or a function",
        ),
        ({"kl_estimator": print}, "--kl_estimator must be one of k1.*, not <built-in"),
        ({"rollout_engine": object()}, "--rollout_engine: <object.*> is no name; known: hf"),
    ],
)
def test_what_is_no_function_is_refused(options, said):
    from lightppo.config import PPOConfig

    with pytest.raises(ConfigError, match=said):
        PPOConfig.from_flat(pretrain="m", prompt_data="d", reward_fn="r.py", **options)


@pytest.fixture
def tables_as_they_were():
    before = [dict(table) for table in TABLES]
    yield
    for table, entries_ in zip(TABLES, before):
        table.clear()
        table.update(entries_)


def test_a_name_alone_is_a_function_of_the_entrys_own_module():
    from lightppo.algorithms.losses import ppo_policy_loss
    from lightppo.table import Entry

    for function in ("ppo_policy_loss", "lightppo.algorithms.losses:ppo_policy_loss"):
        assert entries.PolicyLossEntry(function).fn is ppo_policy_loss
    assert Entry.home == ""  # other tables have no such module


@pytest.mark.usefixtures("tables_as_they_were")
def test_an_entry_from_python_is_a_name_with_flags_checks_and_metrics():
    from lightppo.cli.flags_page import flags_page
    from lightppo.config import PPOConfig, parse_args
    from lightppo.option import Option

    power = Option("mine_power", float, 2.0, "exponent.", gt=0)
    POLICY_LOSSES["mine"] = entries.PolicyLossEntry(
        "lightppo.algorithms.losses:ppo_policy_loss",
        options=(power,),
        metrics={"mine_share": "share of it"},
    )
    needed = ["--pretrain=m", "--prompt_data=d", "--reward_fn=r.py"]
    assert parse_args([*needed, "--policy_loss", "mine"]).resolved().loss.mine_power == 2.0
    assert (
        parse_args([*needed, "--policy_loss", "mine", "--mine_power", "3"]).flat()["mine_power"]
        == 3.0
    )
    for flags, word in (
        (["--mine_power", "3"], "policy_loss mine"),
        (["--policy_loss=mine", "--mine_power=0"], ">0"),
    ):
        with pytest.raises(ConfigError, match=f"--mine_power .*{word}"):
            PPOConfig.from_flat(
                dict(flag.removeprefix("--").split("=") for flag in needed)
                | (
                    {"mine_power": 3.0}
                    if "3" in flags
                    else {"policy_loss": "mine", "mine_power": 0}
                )
            ).validate()
    assert "`--mine_power`" in flags_page()
    assert entries.metric_names()["mine_share"] == "share of it"
