"""Control plane: membership, commits and recovery; sockets around pure functions."""
