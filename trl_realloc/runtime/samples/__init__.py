"""The division of samples among ranks, and samples that outlive an iteration."""
