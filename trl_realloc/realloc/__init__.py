"""Where parameters are and how they move between layouts."""
