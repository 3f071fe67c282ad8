"""Stored rollouts graded again, by another matcher or another grader (``algorist regrade``)."""
