"""Training: ``step`` is the algorithm on one page; ``grpo`` and ``sft`` the trainers; checkpoints, faults, distribution, kernels per device."""
