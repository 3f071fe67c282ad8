"""``python -m algorist``: the same as the ``algorist`` command."""

from algorist.cli.main import main

if __name__ == "__main__":
    main()
