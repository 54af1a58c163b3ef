from command import undisturbed, workplace  # noqa: F401 (fixtures)
