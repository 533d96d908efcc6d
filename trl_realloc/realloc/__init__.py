"""Layouts of parameters over devices (`layout`), and the movement of parameters between layouts."""
