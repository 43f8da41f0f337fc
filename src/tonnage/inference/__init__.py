"""A trained model at work: answers to conversations, in batches or as a stream.

    questions.py   rows of a file as questions with the answers they hold
    generate.py    load a run or a model, answer

Decoding is transformers' ``generate``; this room renders prompts with the data room's templates, so that a model
is asked in exactly the form it was trained on, and sees to batches, padding, stops and limits.
"""
