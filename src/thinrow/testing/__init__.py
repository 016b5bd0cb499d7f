"""For users and for our own tests: contract suites, hypothesis strategies, and the runner of documentation snippets."""
