"""Guess a number: the fewer guesses, the more reward.

    --env examples/environments/guess.py:Guess --env_reward turns --use_dense_reward --reward_source environment

A row has the number in its column ``n``, from 1 to 99.
"""

from __future__ import annotations

from lightppo import Reply, ToolError

COST = 0.05  # of a guess


class Guess:
    """One number and the guesses at it."""

    def reset(self, n: int, **row: object) -> str:
        self.number = n
        return "Guess a number from 1 to 99."

    def guess(self, x: int) -> Reply:
        """Guess the number.

        Args:
            x: your number.
        """
        if not 0 < x < 100:
            raise ToolError("it is between 1 and 99")
        if x == self.number:
            return Reply("right", done=True, reward=1.0)
        return Reply("too low" if x < self.number else "too high", reward=-COST)
