"""The search for a plan: candidates, their estimates, the choice, and corrections learned from a run."""
