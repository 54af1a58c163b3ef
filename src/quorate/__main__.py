"""``python -m quorate``: the same as the command ``quorate``."""

from quorate.cli.main import run

if __name__ == "__main__":
    run()
