"""Makes `tiny` importable by the tests beside it."""
