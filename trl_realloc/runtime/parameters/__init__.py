"""Reallocation, offloading and checks of parameters."""
