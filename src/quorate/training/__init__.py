"""A task becomes a replica, a lane's gradient, a step, and the loop."""
