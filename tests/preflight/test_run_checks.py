"""Which options may change when a run goes on."""

from __future__ import annotations

from pathlib import Path

from lightppo.config import PPOConfig
from lightppo.preflight.run_checks import unsafe_changes


def test_unsafe_changes():
    saved = PPOConfig().flat()
    now = PPOConfig.from_flat(gamma=0.9, seed=1, num_episodes=3, save_path=Path("elsewhere")).flat()
    refused, safe = unsafe_changes(saved, now)
    assert refused == {"gamma": (1.0, 0.9), "seed": (42, 1), "save_path": ("./ckpt", "elsewhere")}
    assert safe == {"num_episodes": (1, 3)}
    only_evaluates = unsafe_changes(
        saved | {"prompt_data": "p.jsonl"}, saved | {"val_only": True}, trains=False
    )
    assert only_evaluates == ({}, {"val_only": (False, True)})


def test_an_evaluation_needs_the_weights_alone_as_they_were():
    saved = PPOConfig.from_flat(
        critic_pretrain="c", ref_pretrain="r", gamma=0.9, input_template="Q: {}"
    ).flat()
    trained = {
        "gamma": 1.0,
        "critic_learning_rate": 1.0,
        "critic_pretrain": "d",
        "prompt_max_len": 7,
        "lora_rank": 8,
    }
    refused, safe = unsafe_changes(saved, saved | trained | {"val_only": True}, trains=False)
    assert refused == {"lora_rank": (0, 8)}
    assert safe == {
        "val_only": (False, True),
        "critic_pretrain": ("c", "d"),
        "prompt_max_len": (1024, 7),
    }
    assert set(unsafe_changes(saved, saved | trained)[0]) == set(trained)
    assert set(unsafe_changes(saved, saved | trained, idle={"gamma", "lora_rank"})[0]) == set(
        trained
    ) - {
        "gamma",
        "lora_rank",
    }


def test_unchanged_and_unknown_options_are_no_change():
    saved = PPOConfig().flat()
    assert unsafe_changes(saved, saved) == ({}, {})
    older = {name: value for name, value in saved.items() if name != "gamma"} | {"gone": 1}
    assert unsafe_changes(older, PPOConfig.from_flat(gamma=0.5).flat()) == ({}, {})
