"""Engines that train and score: replicated, DeepSpeed ZeRO, tensor and pipeline parallel."""
