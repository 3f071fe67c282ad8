"""Short pilots of the routes that a recipe could take, at equal processor seconds (``algorist race``)."""
