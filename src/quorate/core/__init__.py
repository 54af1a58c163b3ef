"""What every floor knows: errors, seeds, digests, generations and timing. No torch, no input or output."""
