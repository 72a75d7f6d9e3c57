"""What ZipCCL did: counters and tables."""
