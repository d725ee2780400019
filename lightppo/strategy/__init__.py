"""Distribution: DeepSpeed engines, optimizers, collectives and checkpoints. Knows modules, no RL."""
