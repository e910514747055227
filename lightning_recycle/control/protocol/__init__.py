"""Protocol of coordinator and workers: messages, and pure functions over states."""
