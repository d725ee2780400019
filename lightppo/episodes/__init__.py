"""Environments and tools over several turns, and the tape."""
