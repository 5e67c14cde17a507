"""What becomes of a push: applied at once (`immediate`), or gathered into an update of several (`gathered`).

`base` is the interface of both.
"""
