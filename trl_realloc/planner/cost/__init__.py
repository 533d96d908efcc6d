"""Cost of a call on a machine: its seconds and bytes under an assignment, and the sources of the unit costs."""
