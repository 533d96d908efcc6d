"""`trl-realloc` and recipes. The verbs that plan need no torch."""
