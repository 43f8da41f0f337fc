"""A page over all runs below a folder, served to a browser on this machine.

    folder.py      the runs below the folder, and which paths are inside of it
    rows.py        what the list says of a run: its state, read from the ends of its files
    watched.py     what is known of runs so far, kept for as long as their files stay as they are
    tags.py        tags and a note, which people give a run
    commands.py    commands of the command line, carried out for the page
    guard.py       who may ask: the token, the names of this machine, the page's policy
    events.py      news for those who watch, as server-sent events
    app.py         the routes
    static/        the page itself: HTML, style and scripts, as they are sent

The server only reads files, and has the command line do everything else: what it plans, shows of data, starts and stops
is what ``tonnage plan``, ``inspect``, ``train`` and ``stop`` do, and torch is in their processes alone.
"""
