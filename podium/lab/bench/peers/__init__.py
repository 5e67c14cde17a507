"""What `podium bench ps` is measured beside: other systems' parameter servers, each as its users would write one.

`work.py` says what all of them do, `team.py` and `script.py` how their processes are started and asked. What needs
packages that Podium's own environment does not have is a script, which imports nothing of Podium.
"""
