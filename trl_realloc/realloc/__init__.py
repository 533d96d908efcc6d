"""Layouts, which say what part of a parameter each device holds (`layout`), and the movement of parts between
layouts."""
