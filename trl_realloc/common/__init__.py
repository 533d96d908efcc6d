"""How a wrong value is refused, files are read within limits, and lines on the terminal."""
