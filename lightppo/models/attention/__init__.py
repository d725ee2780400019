"""Families of attention: packed rows, decoding slots."""
