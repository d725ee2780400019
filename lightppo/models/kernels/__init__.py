"""Fused layers, log probs without logits, products on CPUs."""
