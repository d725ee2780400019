"""Sources of reward: models, HTTP servers, Python functions."""
