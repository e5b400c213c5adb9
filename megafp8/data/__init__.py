"""Data pipeline: preprocessing, tokenizers, token shards, datasets on megatron-core, and the loader.

Only `datasets`, `gpt_dataset`, `loader` and `sample_hash` need torch or megatron-core. Everything else needs only numpy
and the tokenizer's library, so that the preprocessing tools start fast.
"""
