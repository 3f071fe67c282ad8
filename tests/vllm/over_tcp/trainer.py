"""For ``plugins`` of a recipe: the trainer imports none of vLLM's plugins."""

from algorist_over_tcp import register

register()
