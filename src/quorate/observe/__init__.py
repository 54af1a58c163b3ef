"""Events, and the sinks that turn them into files and screens."""
