"""The user's side: the task, how it is loaded, and how far its training is."""
