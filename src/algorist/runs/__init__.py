"""Running: ``draft`` and ``plan`` check a recipe, ``pipeline`` runs its stages, ``outcome`` reports; ``solve`` answers questions."""
