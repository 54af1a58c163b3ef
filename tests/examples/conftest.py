from command import finished, workplace  # noqa: F401 (fixtures)
