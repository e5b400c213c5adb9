"""Records of a run, the sinks that write them, quantization statistics, and health rules on these statistics."""
