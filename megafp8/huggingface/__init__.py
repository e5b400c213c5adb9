"""Checkpoints to and from the files of Hugging Face's transformers."""
