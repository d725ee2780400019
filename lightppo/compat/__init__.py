"""Constructors and call forms of older scripts."""
