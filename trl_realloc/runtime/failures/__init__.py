"""End of a job when a rank fails: the alarm of exceptions, and a watchdog process beside each rank."""
