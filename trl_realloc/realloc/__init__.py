"""Which device holds which part of a model's parameters (`layout`), and how parts move between layouts."""
