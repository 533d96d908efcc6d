"""What executes one call on one device mesh. `base` has the protocols, `training` and `generation` the engines."""
