"""algorist: turn a small language model into a mathematical reasoner."""

from __future__ import annotations

import os

# transformers must not pull TensorFlow in; only set when the user has not decided.
for _name, _value in (("TRANSFORMERS_NO_TF", "1"), ("TRANSFORMERS_NO_TENSORFLOW", "1"), ("USE_TF", "0")):
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"
