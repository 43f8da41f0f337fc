"""What Python calls: ``tonnage.plan``, ``train``, ``start``, ``open_run``, ``Session``, and the ``Run`` that they give.

    said.py       what was given (a config or a model, rows, keyword arguments) as a config
    starting.py   from a config, or a run that goes on, to workers
    run.py        a run's directory as an object, and workers as an iterator over their steps
    session.py    steps of one's own, in this process
    names.py      the functions

The package ``tonnage`` loads these names when they are first asked for; commands call the same functions.
"""
