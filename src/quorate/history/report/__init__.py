"""A run as one HTML page: pure functions from what is known of it to markup."""
