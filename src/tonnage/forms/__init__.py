"""What rows mean: forms of rows, and how each becomes a conversation.

    formats       the forms: the fields that each must and may have, how it is told from others, how it is read
    turns         lists of messages, as all kinds of programs write them
    reader        rows of one source to conversations, and what in them nobody reads
    conversation  what comes of a row: turns, each with its message and what of it is trained

A new form is one entry in ``formats``: the config's schema and the table in ``docs/data.md`` are made from it. This
room opens no file and renders nothing; it imports neither torch nor numpy.
"""
