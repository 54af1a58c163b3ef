from command import finished, undisturbed, workplace  # noqa: F401 (fixtures)
