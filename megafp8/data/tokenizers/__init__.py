"""Tokenizers: building them, the libraries behind them, and encoding many texts at once."""
