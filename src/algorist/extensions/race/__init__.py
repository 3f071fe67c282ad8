"""Which way to train: short pilots of the routes that a recipe could take, at equal processor seconds (``algorist race``)."""
