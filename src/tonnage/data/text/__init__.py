"""Conversation -> Marked: the text that a template makes of turns, and what of it is trained."""
