"""From text to token shards: readers, worker processes, parts that a restart reuses, and tokenizer training."""
