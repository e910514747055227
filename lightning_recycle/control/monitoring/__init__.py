"""Monitoring: history, metrics, page, ``recycle-status``; nothing changes a run."""
