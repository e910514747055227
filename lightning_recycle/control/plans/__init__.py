"""The plans of a run: made ahead, made in need, and changed when operations take other times."""
