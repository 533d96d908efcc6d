"""What a call takes on a machine: its seconds and bytes under an assignment, and where the unit costs come from."""
