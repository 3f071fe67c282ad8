"""Run ``python -m algorist_grader`` as the command ``grade``."""

import sys

from algorist_grader.command import main

sys.exit(main())
