"""From files and hubs to prompts: loading, templates, datasets, the resumable sampler."""
