"""What tests of this room share with those of other rooms."""

from support.fixtures.data_rows import make_tokenizer, tokenizer

__all__ = ["make_tokenizer", "tokenizer"]
