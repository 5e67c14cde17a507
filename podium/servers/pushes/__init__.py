"""What a server does with a push: apply it at once (`immediate`), or gather several into an update (`gathered`).

`base` is the interface of both.
"""
