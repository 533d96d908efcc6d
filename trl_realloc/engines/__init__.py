"""Execution of one call on one device mesh: the protocols in `base`, the engines in `training` and `generation`."""
