"""Contenders of the benches: Podium, and other systems as their users would write them.

`work.py` defines the work of `bench ps`; `team.py` and `script.py` start the contenders' processes and send them
requests. A peer that needs packages outside Podium's environment is a script that imports nothing of Podium.
"""
