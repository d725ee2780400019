"""Episodes: tools and environments over several turns."""
