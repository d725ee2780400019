"""The commands, and what other trainers call our options."""
