"""Random failures against the promise that nothing but time is lost: ``make chaos``.

Concept: a *scenario* is drawn from a seed: a grid, options, and faults of every kind at random points, of replacements
too. It is run with real processes, and what it leaves is checked: the weights against an undisturbed training, the data
against the workers' own diaries (each sample exactly once), the processes against orphans, the time against a bound.

    scenario    what is drawn (pure)
    training    the model, the data, and what an undisturbed training gives
    diary       what each worker writes down of the data that it used, and the audit of it (pure)
    disturbance what makes replacements fail, and gives them time to come
    run         one scenario, checked

Nothing imports this package; it uses the others as a user would.
"""
