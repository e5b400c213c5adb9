"""Conversion of checkpoints from and to the files of Hugging Face transformers."""
