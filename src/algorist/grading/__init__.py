"""Grading: extract → strings → exact numbers → structure → quick points → a killable worker with all the digits needed.

Neither sympy nor torch is imported here; ``precise`` (mpmath) and ``symbolic`` (math-verify) only run inside worker processes.
"""

from algorist.grading.extract import Extraction, boxed, extract, last_boxed
from algorist.grading.grade import grade, grade_completion, grade_many, hash_answer
from algorist.grading.ladder import is_text_only, why_unreadable
from algorist.grading.matchers import MATCHERS, deciding_matcher
from algorist.grading.numeric import numeric_value

__all__ = [
    "MATCHERS",
    "Extraction",
    "boxed",
    "deciding_matcher",
    "extract",
    "grade",
    "grade_completion",
    "grade_many",
    "hash_answer",
    "is_text_only",
    "last_boxed",
    "numeric_value",
    "why_unreadable",
]
