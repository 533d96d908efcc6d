"""Parameters on their way: reallocation, and where they rest."""
