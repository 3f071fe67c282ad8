"""Optional capabilities of a run, one folder or file each; deleting one takes it out. ``algorist.extension`` finds them."""
