"""Models on this machine: loading, tokenizers, caches and the runner."""
