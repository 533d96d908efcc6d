"""Generation engines: vLLM in a separate process, and Transformers in place."""
