"""Which rank gets which samples, and samples that outlive an iteration."""
