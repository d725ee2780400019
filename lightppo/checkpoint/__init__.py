"""Files of a run: saving, resuming, other ranks, exports, storage."""
