"""Registers the pretend GPU at collection: torch's autograd counts devices when the first backward pass runs."""

from tests.cuda.pretend import register

register()
