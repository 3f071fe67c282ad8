"""Before any training: does the recipe fit, will its groups teach, what will it take."""

from algorist.preflight.run import Preflight, preflight

__all__ = ["Preflight", "preflight"]
