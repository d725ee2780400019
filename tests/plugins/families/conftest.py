"""What tests of this plugin share with those of other folders."""

from support.fixtures.families import causal_lm, classifier, configs, family

__all__ = ["causal_lm", "classifier", "configs", "family"]
