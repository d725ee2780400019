"""Numerics of policy optimisation as pure functions over tensors. Needs torch and nothing else."""
