"""Which sources of rewards are on the tape."""

from __future__ import annotations

import pytest

from lightppo.config import PPOConfig
from lightppo.episodes.rewards import TapedReward
from lightppo.ranks import Alone
from lightppo.trainer.build import build_reward

FUNCTION = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"


@pytest.mark.parametrize(
    ("where", "tape", "is_taped"),
    [
        ("score.py", "auto", False),  # a file in place of servers is the run's own code
        ("score.py", "all", True),
        ("http://127.0.0.1:9/score", "auto", True),
        ("http://127.0.0.1:9/score", "off", False),
    ],
)
def test_servers_are_outside_and_files_in_their_place_are_not(tmp_path, where, tape, is_taped):
    (tmp_path / "score.py").write_text(FUNCTION)
    url = where if "://" in where else str(tmp_path / where)
    config = PPOConfig.from_flat(remote_rm_url=[url], save_path=str(tmp_path), tape=tape)
    assert isinstance(build_reward(config, [], None, Alone()), TapedReward) == is_taped
