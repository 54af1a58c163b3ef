from command import workplace  # noqa: F401 (fixtures)
