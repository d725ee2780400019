"""Rows without padding."""
