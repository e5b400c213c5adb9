"""Records of a run, where they are written, quantization statistics and the health rules that read them."""
