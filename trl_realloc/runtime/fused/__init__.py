"""Two models that train in fused pipelines."""
