from command import workplace  # noqa: F401 (a fixture)
