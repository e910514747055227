"""The control plane: who is in, what is committed, what is redone. Sockets and clocks around pure functions."""
