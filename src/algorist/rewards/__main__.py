"""Print the reference page of the rewards: ``python -m algorist.rewards > docs/rewards.md``."""

from algorist.rewards.reference import reference_markdown

print(reference_markdown(), end="")
