"""Search for the line that makes a run fail: the run repeated with some lines changed, then fewer (``algorist bisect``)."""
