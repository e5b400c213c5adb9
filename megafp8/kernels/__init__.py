"""Triton kernels, by what they compute. All modules but `annotations` need Triton to be imported."""
