"""The search for a plan: candidates, their estimates, the choice, and what a run teaches."""
