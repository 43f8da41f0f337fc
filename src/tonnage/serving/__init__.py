"""An endpoint for trying a model, which speaks as OpenAI's does.

requests    what may be asked, and how a wrong request is answered
pieces      tokens into text, up to a stop word
engine      one answer after another, in a thread of its own
app         the routes
"""
