"""What this machine can do: looked up at once, or measured once and remembered for the planner.

``hardware`` looks; ``compute``, ``disk`` and ``link`` measure; ``measure`` runs them all; ``cache`` keeps what they
found and is what the planner asks; ``advice`` says what a user could change.
"""
