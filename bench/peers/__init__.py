"""What a user would pick instead: each holds the same histories and delivers the same events."""
