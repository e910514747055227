"""Messages between workers: connections, values as bytes, sums, states."""
