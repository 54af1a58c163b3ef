from command import finished, undisturbed, used_workplace, workplace  # noqa: F401 (fixtures)
