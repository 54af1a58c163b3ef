from object_store import s3, seaweed  # noqa: F401 (fixtures)
