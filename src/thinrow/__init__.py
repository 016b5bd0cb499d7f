"""thinrow: ultra-long user histories, stored once and rebuilt exactly."""
