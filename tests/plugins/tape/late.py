"""An environment that is late and fails at times, and knows things that nobody can ask for again.

Its numbers come from the clock and the system's random numbers, so that no two runs are told the same. It notes each
call in the file that ``LIGHTPPO_TEST_CALLS`` names.
"""

import os
import random
import time

from lightppo import EnvFailure, Step

WORLD = random.SystemRandom()


def note(what: str) -> None:
    if path := os.environ.get("LIGHTPPO_TEST_CALLS"):
        with open(path, "a") as file:
            file.write(f"{what}\n")


class Late:
    def reset(self, label: str, turns: str = "3", **row: object) -> None:
        note("reset")
        self.left = int(turns)

    def step(self, text: str) -> Step:
        note("step")
        time.sleep(WORLD.uniform(0, 0.02))
        if WORLD.random() < 0.1:
            raise EnvFailure("no world today")
        self.left -= 1
        said = f" {WORLD.randrange(10, 99)} "
        return Step(
            said, reward=WORLD.random(), done=self.left == 0, metrics={"luck": WORLD.random()}
        )

    def get_reward(self) -> float:
        note("get_reward")
        return WORLD.random()
