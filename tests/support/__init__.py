"""What the tests of several rooms share; worker processes import its classes from here.

models       modules in float64 and their data
training     runs on a grid, the plain loop that they must equal, and views of what a run left behind
growth       runs in which replacements come: what waits for them, and views of the history
streams      data without addresses; huggingface_streams the same with ``datasets``
process_tree other processes, as tests look at them
"""
