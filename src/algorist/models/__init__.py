"""Models: ``load`` makes the policy of a recipe, ``loaders`` registers sources and LoRA targets of families, ``tiny`` a model from scratch."""
