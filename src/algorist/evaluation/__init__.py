"""Evaluation: one evaluator (``run``), honest numbers (``estimators``), ``breakdown``, ``compare``, ``artifact``."""
