"""``thinrow demo``: a year of real shopping, replayed, rebuilt and compared with fat rows of the same requests."""
