"""The report: one HTML page on a network, its input and its results."""
