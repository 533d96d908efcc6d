"""The arithmetic of an algorithm and its samples: no process group, no engine."""
