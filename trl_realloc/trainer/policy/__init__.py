"""GRPO's and RLOO's side of a run: the methods of TRL's trainers that a plan replaces."""
