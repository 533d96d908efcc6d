"""Engines that generate: vLLM in a process of its own, and Transformers in place."""
