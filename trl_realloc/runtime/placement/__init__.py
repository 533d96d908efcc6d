"""A rank's engines and groups under a plan."""
