"""The bundled demo: small tasks, a tokenizer and a model made for each other, needing no network and no files.

    tasks.py       families of instruction tasks, and which of their inputs are never trained on
    model.py       the tokenizer and the configuration of a small Llama
    config.yaml    how to train it, with the ordinary schema
    folder.py      all of it written into one folder, for the ordinary commands to work on

Nothing here trains or generates: ``tonnage demo`` runs the same commands on the folder that anyone would.
"""
