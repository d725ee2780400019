"""Engines that turn prompts into sampled responses."""
