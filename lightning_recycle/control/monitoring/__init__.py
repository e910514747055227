"""A run seen from outside: its page, its metrics, and ``recycle-status``. Reads; nothing here can change a run."""
