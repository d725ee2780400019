"""Rollouts by vLLM: in the training processes, or on servers."""
