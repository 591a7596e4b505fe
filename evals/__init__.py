"""Quality benchmarks: whether what the machine decodes is as good as what the reference decodes."""
