"""An environment for tests that train: it counts the characters of a turn, and wants ones and twos.

``turns`` of a row says how many turns its episodes have; ``fails`` that all of them fail.
"""

import hashlib

from lightppo import EnvFailure, Step


class Counting:
    def reset(self, label: str, turns: str = "3", fails: str = "", **row: object) -> None:
        self.left, self.fails = int(turns), fails

    def step(self, text: str) -> Step:
        if self.fails:
            raise EnvFailure("no world today")
        self.left -= 1
        reward = 0.25 * (text.count("1") + text.count("2"))
        said = hashlib.sha256(text.encode()).hexdigest()[:3]
        return Step(f" {len(text)}{said} ", reward=reward, done=self.left == 0)

    def get_reward(self) -> float:
        return 0.5
