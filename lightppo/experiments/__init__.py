"""Experiments with several runs: what one change does (``what_if``), and seeds × settings (``sweep``)."""
