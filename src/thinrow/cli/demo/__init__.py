"""``thinrow demo``: real events, replayed, rebuilt and compared with fat rows of the same requests."""
