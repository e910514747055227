"""Random failures against the promise that nothing but time is lost: ``make chaos``.

Concept: a *scenario* is drawn from a seed: a grid, options, and faults of every kind at random points, also in
replacements. It runs with real processes, and the outcome is checked: the weights against an undisturbed training, the
data against the workers' own diaries (each sample exactly once), that no process is left, and the time against a bound.

    scenario    what is drawn (pure)
    training    the model, the data, and what an undisturbed training gives
    diary       each worker's record of the data that it used, and the audit of it (pure)
    disturbance what makes replacements fail, and gives them time to arrive
    run         one scenario, checked

Nothing imports this package; it uses the others as a user would.
"""
