"""A stand-in for verifiers 0.4: what a taskset and algorist's worker use of it, in a page."""

__version__ = "0.4.0"
