"""Register those that ask a server for ``algorist solve --endpoint URL``: ``@endpoint``. Light: what it needs is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from algorist_grader.registry import Registry

ENDPOINTS: Registry[Callable[..., tuple[Any, int]]] = Registry("endpoint")
"""Called with an address, the model's name there, a model here, prompt format, template's switches and what takes a line; returns what
solves questions there (``Solver.solve``), and the longest completion."""
endpoint = ENDPOINTS.register
