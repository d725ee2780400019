"""Calls of a user's code, in threads and in worker processes that can be killed."""
