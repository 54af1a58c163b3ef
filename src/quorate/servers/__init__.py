"""Parameter servers: which server holds which block, and the rules by which units of work are dealt and applied."""
