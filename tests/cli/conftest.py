from command import finished, undisturbed, used_workplace, workplace  # noqa: F401 (fixtures)
from object_store import s3, seaweed  # noqa: F401 (fixtures)
