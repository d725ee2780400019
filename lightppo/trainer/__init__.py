"""The PPO loop, evaluation, state, logging and reports."""
