"""Evaluation: one evaluator (``run``), honest numbers (``estimators``), files (``artifact``), paired differences (``compare``).

``record`` evaluates a model and writes the artifact; ``doors`` registers exporters, probes and
importers; ``protocols`` names how completions are drawn; ``console`` has the lines of text.
"""
