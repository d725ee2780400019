"""Training on data: SFT, reward models, DPO."""
