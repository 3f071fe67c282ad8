"""A model as a folder of its own, with its card: what is exported, uploaded, and what a round of expert iteration starts from."""
