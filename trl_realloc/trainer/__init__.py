"""The trainer as TRL users see it: trainer, config, callbacks, checkpoints, metrics and reports. Plans are executed in
`runtime`."""
