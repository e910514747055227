"""The plans of a run: made ahead, made when needed, and changed when operations take other times."""
