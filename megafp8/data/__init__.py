"""From text to microbatches: corpus, tokenizers, token shards, datasets on megatron-core, loader.

Only `datasets` and `loader` need torch; everything up to the shards runs on numpy and the tokenizer's own library, so
that the preprocessing tools start at once.
"""
