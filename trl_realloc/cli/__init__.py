"""The command line `trl-realloc`, and recipes (a run as a YAML file). The commands that plan do not import torch."""
