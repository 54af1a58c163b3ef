"""The benchmarks of this project against its peers, side by side in one run.

The launcher measures nothing itself. Every system is a script of its own (`own` and `peers`) that is started with the
interpreter that has it, told what to do by one JSON argument, and answers with one line of JSON. The launcher takes
turns with all systems, round after round, so that noise hits all of them alike.
"""
