"""Division and exchange of samples between ranks."""
