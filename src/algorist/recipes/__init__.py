"""The recipes that ship with the package: one YAML file each; ``extends:`` names the one it starts from."""
