"""What ran: runs read back from their folders, one by one, as a list, or side by side."""
