"""What can be known before a run: files, memory, a dry run."""
