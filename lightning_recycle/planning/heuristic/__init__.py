"""The list-scheduling heuristic: a good plan for any failures, immediately."""
