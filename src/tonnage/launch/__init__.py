"""Starting N identical workers somewhere, and ending them: ``local`` does so on this machine.

A launcher knows nothing of training: it gives every worker its place among the others, watches, passes on
requests to stop, and turns the first failure into one error.
"""
