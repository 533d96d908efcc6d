"""Algorithms as arithmetic on samples. Process groups are in `runtime`, models and devices in `engines`."""
