"""The command line `trl-realloc`, and recipes (a run as a YAML file). Planning commands do not import torch."""
