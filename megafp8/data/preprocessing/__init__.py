"""Preprocessing: turns text files, tables and datasets into token shards."""
