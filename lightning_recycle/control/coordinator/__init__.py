"""The coordinator's process: its thread, its clocks, its journal, the runs it serves."""
