"""How records lie in the files of each kind: `format.py` has the interface, `kinds.py` says which file is which."""
