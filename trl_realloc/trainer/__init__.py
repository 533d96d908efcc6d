"""What a TRL user touches: trainer, config, checkpoints, metrics, reports."""
