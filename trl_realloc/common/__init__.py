"""Errors with suggestions, files read within limits, ranges of settings, and progress messages on the terminal."""
