"""Sockets of the control plane: addresses, handshake, messages, the event loop."""
