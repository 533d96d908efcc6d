"""Running one call on one rank."""
