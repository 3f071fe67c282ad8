"""vLLM as a rollout engine: in this process (``engine``) or as a server (``server``)."""
