"""What a run tells: metrics, its record and its report."""
