"""Runs an execution plan: where engines live (`placement`), how samples travel (`exchange`), the loop (`executor`)."""
