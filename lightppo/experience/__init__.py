"""From scored rollouts to training batches."""
