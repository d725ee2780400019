"""Rewards that check answers."""
