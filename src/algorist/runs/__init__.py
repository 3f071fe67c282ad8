"""Running: ``plan`` checks a recipe, ``pipeline`` runs its stages, ``iterate`` repeats them, ``solve`` and ``endpoint`` answer questions."""
