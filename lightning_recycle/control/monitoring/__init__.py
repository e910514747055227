"""Monitoring: history, metrics, page and ``recycle-status``; nothing changes a run."""
