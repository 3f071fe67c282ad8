"""The command line: ``main`` finds the verb, one file per verb (``VERB_command``), what several share in ``arguments``, ``session``, ``terminal``."""
