"""Grading."""

from algorist.grading.basic import grade, grade_completion, last_boxed, numeric_value

__all__ = ["grade", "grade_completion", "last_boxed", "numeric_value"]
