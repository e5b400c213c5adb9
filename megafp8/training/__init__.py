"""The training loop, and the parts that it is put together from."""
