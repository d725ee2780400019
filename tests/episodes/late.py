"""An environment that is late, fails at times, and answers otherwise whenever it is asked again.

``LIGHTPPO_TEST_FAILURES`` is the share of calls that fail, 0.1 by default. ``LIGHTPPO_TEST_START`` is the number of this
start of the run: it seeds all that is random here, in worker processes with their own number. Each call is noted in the
file that ``LIGHTPPO_TEST_CALLS`` names.
"""

import os
import random
import time

from lightppo import EnvFailure, Step

KEY = f"start {os.environ.get('LIGHTPPO_TEST_START', 0)} rank {os.environ.get('RANK', 0)}"
WORLD = random.Random(KEY)
if "LIGHTPPO_TEST_START" in os.environ:
    # Otherwise all worker processes of a start would fail at the same call.
    os.register_at_fork(after_in_child=lambda: WORLD.seed(f"{KEY} process {os.getpid()}"))


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
        time.sleep(WORLD.uniform(0, 0.03))
        if WORLD.random() < float(os.environ.get("LIGHTPPO_TEST_FAILURES", "0.1")):
            raise EnvFailure("no world today")
        self.left -= 1
        said = f" {WORLD.randrange(10, 99)} "
        luck = {"luck": WORLD.random()}
        return Step(said, reward=WORLD.random(), done=self.left == 0, metrics=luck)

    def get_reward(self) -> float:
        note("get_reward")
        return WORLD.random()
