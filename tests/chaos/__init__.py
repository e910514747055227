"""Random failures against the promise that nothing but time is lost: ``make chaos``.

Concept: a *scenario* is drawn from a seed: a grid, a training, options, and what happens to it. It runs with real
processes, and the outcome is checked: the whole state at the end against an undisturbed training by Lightning itself,
the data against the workers' own diaries (each sample exactly once), that no process is left and nothing in TMPDIR, and
the time against a bound.

    scenario    what a run consists of (pure)
    draws       scenarios from a seed, one function for each family (pure)
    training    the models, the data, the Trainer
    state       all that a training leaves, and how two of them differ
    reference   what an undisturbed training leaves
    diary       each worker's record of the data that it used, and the audit of it (pure)
    trouble     what happens to workers besides faults
    disturbance what makes replacements fail, and gives them time to arrive
    stranger    another process that bothers the run's ports
    workplace   a TMPDIR of its own, and small disks
    run         one scenario, checked
    report      the table of the command (pure)

Nothing imports this package; it uses the others as a user would.
"""

import os

os.environ.setdefault("RECYCLE_VALIDATE", "1")
