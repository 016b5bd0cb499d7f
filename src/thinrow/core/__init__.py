"""What every other package stands on: the error tree, units, the clock, user ids and their bucket hash."""
