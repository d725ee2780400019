"""What tests of this plugin share with those of other folders."""

from support.fixtures.data_rows import make_tokenizer, tokenizer

__all__ = ["make_tokenizer", "tokenizer"]
