"""Samples on their way: who has which, and sends it to whom."""
