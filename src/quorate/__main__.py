"""``python -m quorate``: the same as the command ``quorate``; modules in the working folder are found, too."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Behind Python's own modules: a random.py of the project is not to take the place of Python's.
        here, own = sys.path.pop(0), os.__file__.removesuffix(f"{os.sep}os.py")
        places = (own, f"{own}{os.sep}lib-dynload")
        sys.path.insert(max((i for i, entry in enumerate(sys.path, start=1) if entry in places), default=0), here)

    from quorate.cli.main import run

    run()
