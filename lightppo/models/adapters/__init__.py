"""LoRA, and frozen weights in 4 bits."""
