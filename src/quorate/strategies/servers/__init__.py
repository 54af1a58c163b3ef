"""Parameter servers: processes that hold the parameters and update them."""
