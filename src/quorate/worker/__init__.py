"""A worker process: join, train, recover, leave."""
