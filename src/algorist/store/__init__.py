"""The store: what a run leaves on disk and how it is read back.

``write`` keeps every rollout (Parquet parts) and every metric (JSON lines); ``read`` queries them through DuckDB;
``stages`` names the stages; ``run_folder`` is the layout, the lock and the finished stages of one run; ``atomic`` replaces files whole or not at
all; ``redact`` keeps secrets out; ``safe_text`` shows untrusted text. Nothing here imports torch.
"""
