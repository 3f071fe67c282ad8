"""The reference systems' own rules, one file each: ``dapo``, ``open_r1``, ``cs336``; what several share is in the folder above."""
