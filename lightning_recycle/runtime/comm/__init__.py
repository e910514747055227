"""Messages between workers: authenticated connections, Gloo's groups, values as bytes, sums."""
