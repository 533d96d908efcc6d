"""Launch of a job: its processes and hosts, the network between them, and the launcher's settings."""
