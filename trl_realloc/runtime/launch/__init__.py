"""How a job was launched: its processes and hosts, the network between them, and what the launcher asked for."""
