"""Text training of checkpoints with image or audio towers."""
