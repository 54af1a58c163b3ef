"""The job file: its keys, how it is read and layered, and what is said about its mistakes."""
