"""What tests of this room share with those of other rooms."""

from support.fixtures.data_rows import _own_caches, make_tokenizer, tokenizer, write_jsonl

__all__ = ["_own_caches", "make_tokenizer", "tokenizer", "write_jsonl"]
