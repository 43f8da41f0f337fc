"""Run directories in, one HTML page out: self-contained, and made of nothing but the files of the runs.

    curves.py        records of metrics, thinned to what a page can draw
    gathered.py      the files of a run, as what the page says of it
    settings.py      its config, with what was set told from what is a default
    page.py          a page of one run, or of several side by side
    page.html.jinja, page.css, page.js

The page asks nobody for anything. Whatever comes from files is text: the template escapes it, the script only ever
makes text nodes of it, and the page's own policy lets no other script run than its own.
"""
