"""What a run sends to an experiment tracker: ``trackers``, and the use of the machine (``hardware``)."""
