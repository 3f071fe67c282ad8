"""A server for a model, with OpenAI-compatible endpoints (``algorist serve``)."""
