"""Models: loading, families, tiny models from scratch."""
