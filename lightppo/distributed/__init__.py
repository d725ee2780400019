"""Ranks: DeepSpeed, signals, the watchdog."""
