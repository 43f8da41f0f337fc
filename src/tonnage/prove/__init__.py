"""``tonnage doctor --prove``: does this machine train as it should, and how fast? In pieces, with their figures.

    checks.py       every check with its tolerance: one table
    pieces.py       the pieces in their order, what each is and what it needs
    record.py       what was found: a version of the form, the machine, each piece with its figures
    conduct.py      piece after piece, each in a process of its own, what is there already left alone
    child.py        one piece, in its process
    proof.py        what a piece is given: the device, a folder, where figures go
    machine.py      what is here, and what is missing
    kit.py          wheels for a machine that reaches no registry
    page.py         the record as one page

    bench.py        a known shape trained in a known way, for ``tonnage bench``: no piece, no tolerance
    material.py     tiny models, rows and shapes, made here
    runs.py         runs in this process, and in one that sees no GPU
    the rest        pieces, by what they show

On a GPU its numbers are held against those of the CPU; on a machine without one our kernels are held against torch's
operations. Nothing is fetched, and nothing is sent.
"""
